"""How text is cut into words before BPE merges, by the name a GGUF file gives in `tokenizer.ggml.pre`.

BPE never merges across these cuts, so a wrong pattern gives tokens the model has not learned. A recipe is a
list of patterns, each cutting further what the one before it left whole. Which name means which pattern, and
which names imply lookup before merges or a first token, follows llama.cpp (`llama-vocab.cpp`), whose
converter writes the names; the slow test `test_against_llamacpp` holds every recipe against it. Where its
matcher has only a stand-in for a model's pattern (tekken, gpt-4o: letter case, combining marks), the pattern
here is the model's own, from its `tokenizer.json`.

No recipe normalises Unicode: GGUF files carry no normaliser, and what a person typed stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.model.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


class UnsupportedTokenizer(ModelFileError):
    """The file names a tokenizer or pre-tokenizer not known here; the message lists those that are."""

    def __init__(self, name: str, supported: tuple[str, ...], *, what: str = "pre-tokenizer") -> None:
        super().__init__(f"{what} {name!r} is not supported; supported are: {', '.join(supported)}")
        self.name = name
        self.supported = supported


@dataclass(frozen=True, slots=True)
class PreTokenizerRecipe:
    """What one pre-tokenizer name stands for."""

    patterns: tuple[str, ...]
    """Regular expressions (Oniguruma), applied in order; every match and every gap becomes a piece."""
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is that token, whatever the merges say."""
    add_bos: bool = False
    """Whether a prompt begins with the first token when the file does not say."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _BLANKS
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

RECIPES: tuple[tuple[PreTokenizerRecipe, tuple[str, ...]], ...] = (
    (
        PreTokenizerRecipe((_GPT2,)),
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion"),
    ),
    (
        PreTokenizerRecipe((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        PreTokenizerRecipe((_LLAMA3,), ignore_merges=True, add_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreTokenizerRecipe((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")),
    (
        PreTokenizerRecipe((_QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"),
    ),
    (PreTokenizerRecipe((_QWEN35,)), ("qwen35",)),
    (PreTokenizerRecipe((_SEED_CODER,)), ("seed-coder",)),
    (PreTokenizerRecipe((_BAILING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (PreTokenizerRecipe((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (PreTokenizerRecipe((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (PreTokenizerRecipe(_DEEPSEEK3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (PreTokenizerRecipe(_DEEPSEEK_CODER), ("deepseek-coder",)),
    (PreTokenizerRecipe(_FALCON), ("falcon",)),
    (PreTokenizerRecipe(_DEFAULT), ("default",)),
)
"""Each recipe, and the names that mean it."""

_BY_NAME = {name: recipe for recipe, names in RECIPES for name in names}

SUPPORTED: tuple[str, ...] = tuple(sorted(_BY_NAME))
"""Every value of `tokenizer.ggml.pre` that is known here."""


def recipe_for(name: str) -> PreTokenizerRecipe:
    """The recipe that `tokenizer.ggml.pre` names. Raises UnsupportedTokenizer for a name not in SUPPORTED."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedTokenizer(name, SUPPORTED) from None


def build(recipe: PreTokenizerRecipe) -> PreTokenizer:
    """The recipe as a `tokenizers` pre-tokenizer, which also spells bytes in GPT-2's alphabet."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in recipe.patterns]
    steps.append(ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False))
    return Sequence(steps)
