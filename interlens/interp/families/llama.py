"""Pre-norm blocks with separate projections: attention and MLP each read a normed copy and add to the stream."""

from . import Family, Point, into, out

ROOT = {"embed": out("embed_tokens"), "final_norm": out("norm"), "logits": out("")}
STREAM = {"resid_pre": into(""), "residual": out("")}
ATTENTION = {
    "attn": out("self_attn"),
    "q": out("self_attn.q_proj"),
    "k": out("self_attn.k_proj"),
    "v": out("self_attn.v_proj"),
    "head_out": into("self_attn.o_proj"),
}
PRE_NORM = {
    **ROOT,
    **STREAM,
    **ATTENTION,
    "resid_mid": into("post_attention_layernorm", in_place=True),
    "mlp": out("mlp"),
}


def moe(block: str = "mlp") -> dict[str, Point | tuple[Point, ...]]:
    """Router and routed experts inside the module `block` of a layer; dense layers of the same stack have neither."""
    routers = tuple(Point(path=f"{block}.{name}", end="linear") for name in ("gate", "router"))
    return {"router": routers, "expert_mix": out(f"{block}.experts")}


FAMILIES = (Family(model_types=("llama", "mistral", "qwen2", "qwen3", "gemma"), points=PRE_NORM),)
