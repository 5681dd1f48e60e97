"""The mixture-of-experts layer of the peer, and where its tokens go.

Tokens are sorted by expert once, so that each expert sees one contiguous slice.
"""
import torch
from torch import distributed, nn
from torch.nn import functional as F

from model import Activation, Ffn, matrix, uncompiled


def slots(expert, counts, multiple):
    """Where the rows of each expert go when they lie together, each expert's on a multiple of so many rows: for every
    slot the row in it (any row in those left over), for every row its slot, and the slots of each expert.

    oneDNN makes code for every number of rows that it has not seen yet, which can take as long as the product itself;
    with multiples it soon has seen them all."""
    order, taken = expert.argsort(stable=True), (counts + (multiple - 1)) // multiple * multiple
    shift = (taken.cumsum(0) - taken) - (counts.cumsum(0) - counts)
    slot = torch.empty_like(expert)
    slot[order] = torch.arange(len(order)) + shift[expert[order]]
    if multiple == 1:
        return order, slot, taken
    row = torch.zeros(int(taken.sum()), dtype=torch.int64)
    row[slot] = torch.arange(len(slot))
    return row, slot, taken


class Scatter(torch.autograd.Function):
    """Rows of x to their slots; `row` says which row each slot takes, of which each is there `copies` times. (The
    gradient of index_select adds row by row; this one is a gather too.)"""

    @staticmethod
    def forward(ctx, x, row, slot, copies):
        ctx.save_for_backward(slot)
        ctx.copies = copies
        return x.index_select(0, row // copies if copies > 1 else row)

    @staticmethod
    def backward(ctx, gradient):
        [slot] = ctx.saved_tensors
        gradient = gradient.index_select(0, slot)
        if ctx.copies > 1:
            gradient = gradient.view(-1, ctx.copies, gradient.shape[-1]).sum(1)
        return gradient, None, None, None


class Gather(torch.autograd.Function):
    """Rows back from their slots; slots left over have no gradient."""

    @staticmethod
    def forward(ctx, y, row, slot):
        ctx.save_for_backward(row, slot)
        return y.index_select(0, slot)

    @staticmethod
    def backward(ctx, gradient):
        row, slot = ctx.saved_tensors
        if len(row) == len(slot):
            return gradient.index_select(0, row), None, None
        out = gradient.new_zeros(len(row), gradient.shape[-1])
        out[slot] = gradient
        return out, None, None


class GroupedLinear(torch.autograd.Function):
    """x W_e^T for the rows of each expert, without copies of slices in forward or backward."""

    @staticmethod
    def forward(ctx, x, weights, counts):
        ctx.save_for_backward(x, weights)
        ctx.counts = counts
        y = x.new_empty(x.shape[0], weights.shape[1])
        for rows, weight, out in zip(x.split(counts), weights, y.split(counts)):
            torch.mm(rows, weight.t(), out=out)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weights = ctx.saved_tensors
        gradient, counts = gradient.contiguous(), ctx.counts
        dx, dweights = torch.empty_like(x), torch.empty_like(weights)
        for rows, g, weight, drows, dweight in zip(x.split(counts), gradient.split(counts), weights, dx.split(counts),
                                                   dweights):
            torch.mm(g, weight, out=drows)
            torch.mm(g.t(), rows, out=dweight)
        return dx, dweights, None


def compute_dtype(x):
    """What matrix products use: autocast does not reach into GroupedLinear."""
    return torch.bfloat16 if torch.is_autocast_cpu_enabled() else x.dtype


@uncompiled
def grouped_loop(x, weights, counts):
    dtype = compute_dtype(x)
    return GroupedLinear.apply(x.to(dtype), weights.to(dtype), counts.tolist())


def grouped_native(x, weights, counts):
    dtype = compute_dtype(x)
    return F.grouped_mm(x.to(dtype), weights.to(dtype).transpose(-1, -2), offs=counts.cumsum(0).int())


class Experts(nn.Module):
    def __init__(self, shape, count):
        super().__init__()
        self.w1 = matrix(count, 2, shape.expert, shape.hidden)
        self.w2 = matrix(count, shape.hidden, shape.expert)
        self.activation = Activation(True)
        self.product = grouped_native if shape.native_experts else grouped_loop
        self.multiple = shape.expert_rows

    def forward(self, x, counts):
        """x: the rows of the first expert, then those of the second, ...; counts: rows of each."""
        h = self.product(x, self.w1.flatten(1, 2), counts)
        return self.product(self.activation(h), self.w2, counts)


class Local:
    """All experts are here."""
    world = 1

    def __call__(self, experts, x, ids, counts):
        """x [T, D], ids [T, K], counts [E]; what the experts make of each token, [T K, D]."""
        row, slot, taken = slots(ids.flatten(), counts, experts.multiple)
        y = experts(Scatter.apply(x, row, slot, ids.shape[1]), taken)
        return Gather.apply(y, row, slot)


class AllToAll:
    """The experts are spread over the ranks: rows travel to them and back."""

    def __init__(self, world):
        self.world = world
        self.group = distributed.new_group()  # of its own, so that gradients may be reduced meanwhile

    @uncompiled
    def __call__(self, experts, x, ids, counts):
        row, slot, _ = slots(ids.flatten(), counts, 1)
        sent = counts.view(self.world, -1)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        sizes = sent.sum(1).tolist(), received.sum(1).tolist()
        x = Exchange.apply(Scatter.apply(x, row, slot, ids.shape[1]), sizes, self.group)
        y = self.compute(experts, x, received)
        return Gather.apply(Exchange.apply(y, sizes[::-1], self.group), row, slot)

    def compute(self, experts, x, received):
        """x: from each rank in turn its rows by expert; received [ranks, E here]: how many of each."""
        expert = torch.arange(received.shape[1]).repeat(self.world).repeat_interleave(received.flatten())
        row, slot, taken = slots(expert, received.sum(0), experts.multiple)
        return Gather.apply(experts(Scatter.apply(x, row, slot, 1), taken), row, slot)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return Exchange.run(x, sizes, group)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.run(gradient, ctx.sizes[::-1], ctx.group), None, None

    @staticmethod
    def run(x, sizes, group):
        """As bytes, because gloo does not know bf16."""
        send, receive = sizes
        out = x.new_empty(sum(receive), x.shape[1])
        distributed.all_to_all_single(out.view(torch.uint8), x.contiguous().view(torch.uint8), receive, send,
                                      group=group)
        return out


class Router(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = matrix(shape.experts, shape.hidden)
        self.shape = shape

    def forward(self, x, sequences):
        """x [T, D]. Weights and experts [T, K], counts [E], the auxiliary loss (1: every sequence in balance)."""
        E, K = self.shape.experts, self.shape.top_k
        with torch.autocast("cpu", enabled=False):
            p = F.linear(x.float(), self.weight.float()).softmax(-1)
        weights, ids = p.topk(K)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = (ids.view(sequences, -1, 1) == torch.arange(E)).sum(1)  # [B, E]
        share = chosen / (chosen.sum(1, keepdim=True))
        aux = E * (share * p.view(sequences, -1, E).mean(1)).sum(1).mean()
        return weights, ids, chosen.sum(0), aux


class Moe(nn.Module):
    def __init__(self, shape, dispatcher):
        super().__init__()
        self.shape, self.dispatcher = shape, dispatcher
        self.router = Router(shape)
        self.experts = Experts(shape, shape.experts // dispatcher.world)
        self.shared = Ffn(shape, shape.shared)

    def forward(self, x):
        B, S, D = x.shape
        x, K = x.view(-1, D), self.shape.top_k
        weights, ids, counts, aux = self.router(x, B)
        y = self.dispatcher(self.experts, x, ids, counts)
        y = (y.view(-1, K, D) * weights.unsqueeze(-1).type_as(y)).sum(1)
        return (y + self.shared(x)).view(B, S, D), aux
