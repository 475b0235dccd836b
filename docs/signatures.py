"""What the site's reader of code does not see: decorators of reformax.ops make dataclasses."""

from __future__ import annotations

from typing import Any

from griffe import Class, Decorator, ExprCall, ExprKeyword, ExprName, Extension

MAKE_DATACLASSES = "reformax.ops.base.options", "reformax.ops.calls.options.options"


class Ops(Extension):
    """Gives ops the decorator that these apply, whose signatures Griffe knows."""

    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        """Adds it as a class is read; Griffe asks for it when it has read the package."""
        for decorator in list(cls.decorators):
            if getattr(decorator.value, "canonical_path", None) in MAKE_DATACLASSES:
                made = ExprCall(ExprName("dataclasses.dataclass"), [ExprKeyword("kw_only", "True")])
                lines = dict(lineno=decorator.lineno, endlineno=decorator.endlineno)
                cls.decorators.append(Decorator(made, **lines))
