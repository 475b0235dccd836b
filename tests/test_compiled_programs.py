"""What the harness of benchmarks reads from compiled programs: who sends what, and what is read."""

import jax
import pytest

from benchmarks.harness import configured
from reformax.data import listops, masked, reverse, stdlib
from reformax.training import mesh as mesh_lib
from tests.data import test_labelled
from tools import described, program
from tools.hlo_collectives import collectives
from tools.traffic import Kernel, kernels

ROWS = (0, 1, 2, 3), (4, 5, 6, 7)
COLUMNS = (0, 4), (1, 5), (2, 6), (3, 7)


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ROWS),
        ("mesh['a'=1,'b'=8] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
    ],
)
def test_groups_of_devices_are_read_in_every_notation(written, groups):
    line = (
        f"  %sum = f32[6]{{0}} all-reduce(%x), channel_id=1, replica_groups={written}, to_apply=%f"
    )
    (found,) = collectives(f"ENTRY %main (x: f32[6]) -> f32[6] {{\n{line}\n}}\n")
    assert found.groups == groups
    n = len(groups[0])
    assert found.sent == pytest.approx(2 * (n - 1) / n * 24)


def test_groups_that_are_not_understood_are_an_error():
    line = "  %sum = f32[6]{0} all-reduce(%x), replica_groups=other, to_apply=%f"
    with pytest.raises(ValueError, match="unknown groups of devices in .*replica_groups=other"):
        collectives(f"ENTRY %main (x: f32[6]) -> f32[6] {{\n{line}\n}}\n")


PROGRAM = """HloModule jit_step
%f (p: f32[2,3]) -> f32[2,3] {
  %p = f32[2,3]{1,0} parameter(0)
  ROOT %sum = f32[2,3]{1,0} add(%p, %p)
}

%patched (p: f32[2,3], q: f32[8]) -> (f32[6], f32[2]) {
  %p = f32[2,3]{1,0} parameter(0)
  %flat = f32[6]{0} bitcast(%p)
  %q = f32[8]{0} parameter(1)
  %head = f32[2]{0} slice(%q), slice={[0:2]}
  %zero = s32[] constant(0)
  %new = f32[6]{0} dynamic-update-slice(%flat, %head, %zero)
  ROOT %both = (f32[6]{0}, f32[2]{0}) tuple(%new, %head)
}

%body (x: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %x = (s32[], f32[2,3]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %y = f32[2,3]{1,0} get-tuple-element(%x), index=1
  %add_fusion.1 = f32[2,3]{1,0} fusion(%y), kind=kLoop, calls=%f, metadata={op_name="jit(f)/add"}
  ROOT %t = (s32[], f32[2,3]{1,0}) tuple(%i, %add_fusion.1)
}

ENTRY %main (a: bf16[4,5]) -> f32[2,3] {
  %a = bf16[4,5]{1,0} parameter(0)
  %norm.2 = (bf16[4,5]{1,0}, /*index=1*/f32[4]{0}) custom-call(%a), \
custom_call_target="triton", metadata={op_name="jit(f)/transpose(jvp(norm))/pallas_call"}
  %b = bf16[4,5]{1,0} get-tuple-element(%norm.2), index=0
  %dot.7 = f32[2,3]{1,0} custom-call(%b, %b), custom_call_target="matmul"
  %loop = (s32[], f32[2,3]{1,0}) while(%i), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %patch_fusion = (f32[6]{0}, f32[2]{0}) fusion(%dot.7, %c), kind=kLoop, calls=%patched
  ROOT %out = f32[2,3]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_kernels_are_counted_with_what_they_read_and_write():
    assert kernels(PROGRAM) == [
        Kernel("norm", "jit(f)/transpose(jvp(norm))/pallas_call", 40, 56, 1),
        Kernel("matmul", "", 80, 24, 1),
        Kernel("add_fusion", "jit(f)/add", 24, 24, 7),
        Kernel("patch_fusion", "", 8, 16, 1),  # of 24 + 32 and 24 + 8
    ]


@pytest.mark.parametrize(
    "task",
    [
        stdlib.stdlib(max_bytes=1000),
        listops.listops(5, 21, n_train=9, n_eval=9),
        masked.masked(listops.listops(5, 21, n_train=9, n_eval=9), length=20),
        test_labelled.task(pairs=True),
        reverse.reverse(),
    ],
    ids=lambda task: task.kind,
)
def test_a_program_is_compiled_for_batches_of_its_task(task):
    got, want = program.batch_of(task.kind, 2, 20), task.train_batch(0, 0, 2, 20)
    assert type(got.inputs) is type(want.inputs) or task.kind in ("text", "labels", "masked")
    shapes = [[x.shape for x in jax.tree.leaves(batch)] for batch in (got, want)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--attention=lsh", "no compiler for NVIDIA GPUs is installed: pip install"),
        ("--attention=lsh --devices=2", "--devices and --mesh divide a training step"),
        ("--tiny --devices=99", "--devices is 99, and with --tiny there are "),
    ],
)
def test_what_cannot_be_compiled_is_told(flags, told, capsys):
    with pytest.raises(SystemExit):
        program.main(flags.split())
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_products_of_a_step_add_their_biases():
    """XLA's own choice for an H200: no kernel but a product's reads and writes its output."""
    sizes = "n_layers=2", "n_heads=4", "d_model=256", "d_ff=1024", "vocab_size=4096"
    overrides = *sizes, "batch_size=16", "pos_axial_shape=(1024,)", "first_token=0"
    settings = configured.from_config(["gpt2.gin"], overrides)
    gpu = described.GPUS["h200"]
    try:
        (device,) = described.devices(gpu)
        with described.assumed(gpu):
            _, lowered = program.training_step(settings, mesh_lib.make({}, [device]))
            compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    except NotImplementedError as error:
        pytest.skip(str(error))
    found = kernels(compiled.as_text())
    written = 2 * 16 * 1024 * 256  # bytes of a projection of all heads, in bfloat16
    assert any("matmul" in kernel.kind for kernel in found)
    sums = [x for x in found if "add_fusion" in x.kind and x.written == written]
    assert not sums
