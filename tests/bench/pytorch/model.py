"""The transformer that Shoal trains, in PyTorch: same parameters, same names, same mathematics.

Shapes: B sequences of S tokens, T = B S; D model width, G key/value heads, R queries per key, C head size,
E experts, K of them per token, F hidden width.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

NEWEST = hasattr(torch, "compiler")  # else 1.13, which has none of the newer functions


def uncompiled(function):
    return torch.compiler.disable(function) if NEWEST else function


def matrix(*shape):
    return nn.Parameter(torch.empty(*shape))


class RmsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = matrix(size), eps

    def forward(self, x):
        if NEWEST:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).type_as(x) * self.weight


class LayerNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.bias, self.eps = matrix(size), matrix(size), eps

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Linear(nn.Module):
    """x W^T (+ b); the weight may have its outputs in several dimensions."""

    def __init__(self, *shape, bias):
        super().__init__()
        self.weight = matrix(*shape)
        self.bias = matrix(*shape[:-1]) if bias else None

    def forward(self, x):
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.flatten(0, -2), bias)


def rope_tables(seq, head_size, theta):
    """cos and sin, [S, C / 2]."""
    rates = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


class LoopedMatmul(torch.autograd.Function):
    """Batched product by a loop of plain ones, for builds whose batched f32 product is slow (no MKL)."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return LoopedMatmul.product(a, b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return (LoopedMatmul.product(gradient, b.transpose(-1, -2)),
                LoopedMatmul.product(a.transpose(-1, -2), gradient))

    @staticmethod
    def product(a, b):
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        for left, right, into in zip(a.flatten(0, 1), b.flatten(0, 1), out.flatten(0, 1)):
            torch.mm(left, right, out=into)
        return out


def matmul(a, b):
    if a.dtype == torch.float32 and not torch.is_autocast_cpu_enabled() and not torch.backends.mkl.is_available():
        return LoopedMatmul.apply(a, b)
    return a @ b


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        groups, per_group = shape.kv_heads, shape.heads // shape.kv_heads + 2
        self.qkv = Linear(groups, per_group, shape.head_size, shape.hidden, bias=shape.bias)
        self.out = Linear(shape.hidden, shape.heads * shape.head_size, bias=shape.bias)
        if shape.rope_theta:
            cos, sin = rope_tables(shape.seq, shape.head_size, shape.rope_theta)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        mask = torch.full((shape.seq, shape.seq), -math.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def rotate(self, x):
        """x [B, S, G, R, C]; dimensions i and i + C / 2 turn together."""
        cos, sin = self.cos[:, None, None].to(x.dtype), self.sin[:, None, None].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x):
        s = self.shape
        B, S, _ = x.shape
        qkv = self.qkv(x).view(B, S, s.kv_heads, -1, s.head_size)
        qk, v = qkv[:, :, :, :-1], qkv[:, :, :, -1]
        if s.rope_theta:
            qk = self.rotate(qk)
        q, k = qk[:, :, :, :-1], qk[:, :, :, -1]
        attend = self.fused if s.fused_attention else self.explicit
        return self.out(attend(q, k, v).reshape(B, S, -1))

    def fused(self, q, k, v):
        q = q.flatten(2, 3)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           enable_gqa=self.shape.heads != self.shape.kv_heads)
        return y.transpose(1, 2)

    def explicit(self, q, k, v):
        """The queries of a group one after another, so that keys and values are not repeated."""
        B, S, G, R, C = q.shape
        q = q.permute(0, 2, 3, 1, 4).reshape(B, G, R * S, C)
        scores = matmul(q, k.permute(0, 2, 3, 1)) * C ** -0.5
        p = torch.softmax(scores.view(B, G, R, S, S) + self.mask.to(scores.dtype), -1)
        y = matmul(p.view(B, G, R * S, S).type_as(q), v.transpose(1, 2).contiguous())
        return y.view(B, G * R, S, C).transpose(1, 2)


class Activation(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.gated = gated

    def forward(self, h):
        if not self.gated:
            return F.gelu(h)
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up


class Ffn(nn.Module):
    def __init__(self, shape, width):
        super().__init__()
        D = shape.hidden
        self.w1 = matrix(2, width, D) if shape.gated else matrix(width, D)
        self.w2 = matrix(D, width)
        self.b1, self.b2 = (matrix(width), matrix(D)) if shape.bias else (None, None)
        self.activation = Activation(shape.gated)

    def forward(self, x):
        return F.linear(self.activation(F.linear(x, self.w1.flatten(0, -2), self.b1)), self.w2, self.b2)


class Block(nn.Module):
    def __init__(self, shape, dispatcher):
        super().__init__()
        norm = LayerNorm if shape.layer_norm else RmsNorm
        self.attention_norm, self.ffn_norm = norm(shape.hidden, shape.eps), norm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        if shape.experts:
            from moe import Moe
            self.moe = Moe(shape, dispatcher)
        else:
            self.ffn = Ffn(shape, shape.ffn)

    def forward(self, x):
        """The new residual stream, and the auxiliary loss before its coefficient (0 in dense layers)."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.ffn_norm(x)
        if not hasattr(self, "moe"):
            return x + self.ffn(normed), 0.0
        y, aux = self.moe(normed)
        return x + y, aux


class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = matrix(*shape)


class Transformer(nn.Module):
    def __init__(self, shape, dispatcher):
        super().__init__()
        self.shape = shape
        self.embedding = Weight(shape.vocab, shape.hidden)
        if not shape.rope_theta:
            self.position = Weight(shape.seq, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, dispatcher) for _ in range(shape.layers))
        self.final_norm = (LayerNorm if shape.layer_norm else RmsNorm)(shape.hidden, shape.eps)
        if not shape.tied:
            self.head = Weight(shape.vocab, shape.hidden)

    def forward(self, rows):
        """rows [B, S + 1]; the loss of the language model and what is to be minimised."""
        x = F.embedding(rows[:, :-1], self.embedding.weight)
        if not self.shape.rope_theta:
            x = x + self.position.weight
        aux = 0.0
        for layer in self.layers:
            x, more = layer(x)
            aux = aux + more
        head = self.embedding if self.shape.tied else self.head
        logits = F.linear(self.final_norm(x), head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        return loss, loss + aux * (self.shape.aux_coeff / self.shape.layers)
