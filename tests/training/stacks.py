"""Every kind of stack, as a model and its options, by name."""

from reformax.models import ReformerLM, TransformerLM

STACKS = {
    "residual": (TransformerLM, {}),
    "remat": (TransformerLM, dict(remat_policy="nothing")),
    "reversible": (ReformerLM, {}),
    "exact": (ReformerLM, dict(exact=True)),
    "slots": (ReformerLM, dict(n_slots=8)),
    "kept": (ReformerLM, dict(remat_policy="all", scan_layers=False)),
}
