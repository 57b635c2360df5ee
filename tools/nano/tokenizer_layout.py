"""The nano model's tokenizer: DeepSeek V4's layout (normalizer, splits, byte-level BPE, special tokens) at 1,024 entries.

Ids: 0 BOS, 1 EOS, 2 pad, 3..258 the bytes, then merges up to 991, then the added tokens 992..1023.
"""
import json

VOCABULARY = 1024
FIRST_ADDED = 992
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
ADDED = [USER, ASSISTANT, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<|EOT|>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", THINK, END_THINK, "｜DSML｜",
         "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜title｜>", "<｜search▁begin｜>", "<｜end_of_query｜>"]
SPECIAL = {"<｜end_of_query｜>"}        # of ADDED; BOS, EOS, pad and placeholders are special as well
SPLITS = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
          "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
          "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{- message.content -}}"
    "{%- elif message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}"
    "{%- elif message.role == 'assistant' -%}"
    "{{- '<｜Assistant｜></think>' + message.content + eos_token -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}"
    "{%- endif -%}")


def added_tokens():
    def entry(i, content, special): return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
                                            "normalized": not special, "special": special}
    out = [entry(BOS_ID, BOS, True), entry(EOS_ID, EOS, True), entry(PAD_ID, PAD, True)]
    names = ADDED + [f"<｜place▁holder▁no▁{n}｜>" for n in range(VOCABULARY - FIRST_ADDED - len(ADDED))]
    return out + [entry(FIRST_ADDED + i, name, name in SPECIAL or "place▁holder" in name) for i, name in enumerate(names)]


def shell():
    """tokenizer.json without vocabulary and merges."""
    split = lambda regex: {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(),
            "normalizer": {"type": "Sequence", "normalizers": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(split, SPLITS), level]},
            "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": {}, "merges": []}}


def train(texts, path):
    """Learns the merges from `texts`, writes tokenizer.json to `path`, returns the loaded tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(s), "isolated") for s in SPLITS] + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    learner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=FIRST_ADDED, special_tokens=[BOS, EOS, PAD], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    out = shell()
    out["model"]["vocab"] = dict(sorted(learned["vocab"].items(), key=lambda p: p[1]))
    out["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in learned["merges"]]
    ids = sorted(out["model"]["vocab"].values())
    if ids != list(range(FIRST_ADDED)): raise SystemExit(f"tokenizer: {len(ids)} learned entries, {FIRST_ADDED} expected: give it more text")
    with open(path, "w", encoding="utf-8") as f: json.dump(out, f, ensure_ascii=False, separators=(",", ":"))
    return Tokenizer.from_file(path)


def write_config(path):
    def token(content): return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    config = {"add_bos_token": False, "add_eos_token": False, "bos_token": token(BOS), "clean_up_tokenization_spaces": False,
              "eos_token": token(EOS), "legacy": True, "model_max_length": 65536, "pad_token": token(EOS), "sp_model_kwargs": {},
              "unk_token": None, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    with open(path, "w", encoding="utf-8") as f: json.dump(config, f, ensure_ascii=False, indent=1)
