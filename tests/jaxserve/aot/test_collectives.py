"""What travels, as it stands in HLO that the TPU and GPU compilers wrote."""

from jaxserve.aot.collectives import Collective, collectives

HLO = """
HloModule jit_step, is_scheduled=true
%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
%all-reduce.42 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.7), channel_id=3, replica_groups={{0,1,2,3}}, \
to_apply=%add.clone, metadata={op_name="jit(step)/jit(_run_layer)/dot_general" source_file="layers.py"}
%all-reduce.43 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.8), channel_id=4, to_apply=%add.clone
%all-gather-start.1 = (f32[8,20,64]{2,1,0}, f32[64,20,64]{2,1,0}) all-gather-start(%sort.1), dimensions={0}, \
metadata={op_name="jit(step)/top_k"}
%all-gather-done.1 = f32[64,20,64]{2,1,0} all-gather-done(%all-gather-start.1)
%all-reduce.44 = pred[] all-reduce(%any.1), to_apply=%or
%fusion.9 = bf16[64,4096]{1,0} fusion(%all-reduce.42), kind=kLoop, calls=%all-reduce-consumer
"""


def test_collectives_are_counted_by_kind_and_result_with_their_bytes_and_origin() -> None:
    layer, gather, flag = collectives(HLO)
    assert layer == Collective(
        kind="all-reduce",
        result="bf16[64,4096]",
        result_bytes=64 * 4096 * 2,
        count=2,
        op_name="jit(step)/jit(_run_layer)/dot_general",
    )
    assert (gather.kind, gather.result, gather.count) == ("all-gather", "f32[64,20,64]", 1)
    assert (flag.result, flag.result_bytes, flag.op_name) == ("pred[]", 1, "")


def test_a_program_of_one_device_has_none() -> None:
    assert collectives("%dot.1 = f32[4,4]{1,0} dot(%a, %b)") == ()
