# ruff: noqa: E501
"""Small tokenizers, trained in a moment, with chat templates written in the style of known families."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user assistant system tool model the quick brown fox jumps over a lazy dog and says hello there",
    "Let's debate whether cereal is a soup, or a salad. I think it is a soup! Why do you say so?",
    "final analysis commentary thought function name arguments parameters Human Assistant User Question Answer",
    "moderator alice bob carol 0 1 2 3 4 5 6 7 8 9 < > { } [ ] / = : ; , . ? ! think THINK tool_call",
]


@cache
def _trained(kind: str) -> str:
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:  # "pieces": SentencePiece style, a dummy space in front, bytes as a fallback
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        specials = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)]]
        trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make(
    template: str, *, kind: str = "bytes", bos: str | None = None, eos: str = "<eos>", special: tuple[str, ...] = (),
    plain: tuple[str, ...] = (), rstrip: tuple[str, ...] = (), adds_bos: bool = False,
) -> PreTrainedTokenizerFast:  # fmt: skip
    """A tokenizer with these added tokens and this chat template."""
    text = _trained(kind)
    if kind == "pieces":  # bytes are ordinary tokens, not added ones
        import json

        data = json.loads(text)
        data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] == "<unk>"]
        text = json.dumps(data)
    backend = Tokenizer.from_str(text)
    names = dict.fromkeys([*([bos] if bos else []), eos, *special])
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False, rstrip=n in rstrip) for n in names])
    backend.add_tokens([AddedToken(n, special=False, normalized=False) for n in plain])
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


_CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ '# Tools\n<tools>' }}{% for t in tools %}{{ '\n' + (t | tojson) }}"
    "{% endfor %}{{ '\n</tools>\nAnswer with <tool_call>...</tool_call><|im_end|>\n' }}"
    "{% elif messages and messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_CHATML_BODY = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
_GEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + _GEN
)
QWEN2 = _CHATML_TOOLS + _CHATML_BODY + _GEN
QWEN3 = (
    _CHATML_TOOLS
    + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and loop.last %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + c }}"
    "{% else %}{{ '<|im_start|>assistant\n' + c }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' %}"
    "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + c + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools and not (messages and messages[0].role == 'system') %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{% for t in tools %}{{ (t | tojson) + '\n' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first and m.role == 'system' %}{% for t in tools %}{{ (t | tojson) + '\n' }}{% endfor %}{% endif %}"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.first and sys %}{% set c = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m.content %}{% else %}{% set c = m.content %}"
    "{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + c | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + c | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant roles') }}"
    "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{% if loop.last and tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}{{ '[INST]' }}{% if loop.last and sys %}{{ sys + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL3 = (  # tool results only after structured calls, whose ids have nine letters
    "{{ bos_token }}{% set ns = namespace(turn=0, user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set calls = m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}"
    "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% else %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.user %}"
    "{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + (m.content | tojson) + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endif %}{% endfor %}"
)
MAGISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
    "{% set c = m.content %}{% if '[/THINK]' in c %}{% set c = c.split('[/THINK]')[-1] %}{% endif %}{{ c + eos_token }}"
    "{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}"
    "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
HARMONY = (
    "{% if tools %}{{ '<|start|>developer<|message|># Tools\n' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
COHERE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ '<|' + ('CHATBOT' if m.role == 'assistant' else m.role | upper) + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

_IM = dict(eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"))
_TURN = dict(bos="<bos>", eos="<eos>", special=("<start_of_turn>", "<end_of_turn>"))

FAMILIES = {
    "chatml": dict(template=CHATML, **_IM),
    "qwen2": dict(template=QWEN2, **_IM, plain=("<tool_call>", "</tool_call>")),
    "qwen3": dict(template=QWEN3, **_IM, plain=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "r1": dict(template=R1, bos="<|begin|>", eos="<|end|>", special=("<|User|>", "<|Assistant|>"),
               plain=("<think>", "</think>")),
    "llama3": dict(template=LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>",
                   special=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"), adds_bos=True),
    "gemma2": dict(template=GEMMA2, kind="pieces", **_TURN, adds_bos=True),
    "gemma3": dict(template=GEMMA3, kind="pieces", **_TURN, adds_bos=True),
    "llama2": dict(template=LLAMA2, kind="pieces", bos="<s>", eos="</s>", adds_bos=True),
    "mistral": dict(template=MISTRAL, kind="pieces", bos="<s>", eos="</s>",
                    special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), adds_bos=True),
    "mistral3": dict(template=MISTRAL3, kind="pieces", bos="<s>", eos="</s>",
                     special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                              "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), adds_bos=True),
    "magistral": dict(template=MAGISTRAL, bos="<s>", eos="</s>",
                      special=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]")),
    "phi3": dict(template=PHI3, kind="pieces", bos="<s>", eos="<|endoftext|>",
                 special=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
                 rstrip=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "zephyr": dict(template=ZEPHYR, kind="pieces", bos="<s>", eos="</s>"),
    "vicuna": dict(template=VICUNA, kind="pieces", bos="<s>", eos="</s>"),
    "harmony": dict(template=HARMONY, eos="<|return|>",
                    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")),
    "cohere": dict(template=COHERE, bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>",
                   special=("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
                            "<|START_THINKING|>", "<|END_THINKING|>")),
}  # fmt: skip


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family."""
    return make(**FAMILIES[name])
