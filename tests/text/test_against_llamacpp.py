"""Every recipe's tokens against llama.cpp's own, over a vocabulary whose merges cross every cut.

A published vocabulary cannot show a wrong cut: it has no merges across the right ones. So merges are learned
here from uncut text, and any cut in the wrong place changes the tokens.
"""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.model.gguf import GGUFFile
from octavo.text import pre_tokenizers
from octavo.text.tokenizer import Tokenizer
from text.vocabularies import CONTROL, NORMAL, USER_DEFINED

# llama.cpp has stand-ins for the patterns of these models, because its own matcher knows no letter case.
STAND_INS = {"tekken", "gpt-4o"}

SENTENCES = [
    "I'm you'Re they'LL 'S x'd\n\n  \n\tHello   world!!  \r\n\r\n 12 123 1234 12345 ３４ ½ Ⅷ a1b22\n",
    "naïve café Ångström ÀÉÎ ñ e\u0301 a\u0300b नमस्ते สวัสดี שלום مرحبا",
    "你好，世界！。今天2026年 こんにちは カタカナ 한국어",
    "def f(x):\n    return x**2  # comment\n\n\nclass A_b(object):\n\t\tpass $x += <a> ~^|`",
    "😀👩‍👩‍👧 ok…—“quote” ‘x’ ﷽ ①② CamelCase XMLHttpRequest /path/to//x\n/ ...\n ?!\n\n   end  \n ",
    " \u00a0\u2003x\u3000y  <think> <|im_end|> <|im_end <<think>>",
]
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}


def random_texts(count: int) -> list[str]:
    dice = random.Random(5)
    letters = "abcAB 'sStTlLdD019\n\r\t  .,!$+<=>^~|`/é你ñ½\u0301😀_-#"
    return ["".join(dice.choices(letters, k=dice.randint(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def uncut_vocabulary() -> tuple[list[str], list[str]]:
    from tokenizers import Tokenizer as Trainable
    from tokenizers import models, pre_tokenizers, trainers

    learner = Trainable(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    learner.train_from_iterator([*SENTENCES * 20, *random_texts(200)], trainer)
    model = json.loads(learner.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: int(model["vocab"][token]))
    return [*SPECIAL, *tokens], [" ".join(merge) for merge in model["merges"]]


def write_model(path: Path, pre: str, tokens: list[str], merges: list[str]) -> None:
    """The smallest model llama.cpp loads, around this vocabulary."""
    size, writer = 32, gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([SPECIAL.get(token, NORMAL) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), size), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((size, size), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pre", [names[0] for _, names in pre_tokenizers.RECIPES if names[0] not in STAND_INS]
)
def test_every_text_has_llama_cpps_tokens(
    pre: str, uncut_vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    path = tmp_path / "model.gguf"
    write_model(path, pre, *uncut_vocabulary)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port = str(path), 64, 1, 0
    params.cpuparams.n_threads, params.warmup = 1, False
    server = xllamacpp.Server(params)
    with GGUFFile(path) as file:
        ours = Tokenizer.from_gguf(file.metadata)
    for text in [*SENTENCES, *random_texts(150)]:
        for add_special in (False, True):
            for parse_special in (False, True):
                asked = {"content": text, "add_special": add_special, "parse_special": parse_special}
                url = f"{server.listening_address}/tokenize"
                with urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=30) as response:
                    theirs = json.load(response)["tokens"]
                assert ours.encode(text, add_special=add_special, parse_special=parse_special) == theirs
