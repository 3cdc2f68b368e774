"""Tiny models from transformers configurations, without dropout and without weights from anywhere."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.zoo import Case, case, token_loss

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROUNDED_INSIDE = 1e-5  # these models compute some norm or softmax in fp32 whatever their weights are


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    return token_loss(output.logits[:, :-1], targets[:, 1:])


def class_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets)


def language(model: Any, rows: int = 12, length: int = 6, mask: bool = False) -> Case:
    ids = torch.randint(3, 40, (rows, length))
    kwargs: Case = {"input_ids": ids}
    if mask:
        kwargs["attention_mask"] = torch.ones_like(ids)
        kwargs["attention_mask"][:2, length - 2 :] = 0
    return {"model": model, "args": (), "kwargs": kwargs, "targets": ids.clone(), "loss_fn": next_token_loss}


@case()
def hf_gpt2() -> Case:
    off: Case = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(vocab_size=41, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **off)
    return language(GPT2LMHeadModel(config), mask=True)


@case(fp64=ROUNDED_INSIDE)
def hf_llama() -> Case:
    sizes: Case = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return language(LlamaForCausalLM(LlamaConfig(vocab_size=41, max_position_embeddings=8, use_cache=False, **sizes, **SPECIAL)), mask=True)


@case()
def hf_bert() -> Case:
    sizes: Case = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8}
    off: Case = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made = language(BertForSequenceClassification(BertConfig(vocab_size=41, num_labels=3, **sizes, **off)), rows=13, mask=True)
    made["kwargs"]["token_type_ids"] = torch.zeros_like(made["kwargs"]["input_ids"])
    return {**made, "targets": torch.randint(0, 3, (13,)), "loss_fn": class_loss}


@case(fp64=ROUNDED_INSIDE)
def hf_t5() -> Case:
    sizes: Case = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=41, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes)
    made = language(T5ForConditionalGeneration(config))
    made["kwargs"]["decoder_input_ids"] = torch.randint(3, 40, (12, 5))
    return {**made, "targets": torch.randint(3, 40, (12, 5))}


@case()
def hf_vit() -> Case:
    sizes: Case = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
    model = ViTForImageClassification(ViTConfig(num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))
    images = torch.randn(12, 3, 8, 8)
    return {"model": model, "args": (), "kwargs": {"pixel_values": images}, "targets": torch.randint(0, 5, (12,)), "loss_fn": class_loss}


@case(fp64=ROUNDED_INSIDE)
def hf_mamba() -> Case:
    sizes: Case = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 3, "time_step_rank": 2}
    return language(MambaForCausalLM(MambaConfig(vocab_size=41, use_cache=False, **sizes, **SPECIAL)), length=4)
