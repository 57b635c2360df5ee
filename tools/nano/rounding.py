"""The checkpoint's roundings as torch functions with straight-through gradients, and a faster, equal form of the expert layer."""
import types

import torch
import torch.nn.functional as F


class Switches:
    """What is rounded at present; training turns it on part of the way through."""
    weights = False
    cache = False


def power_of_two_ceil(largest, limit):
    """The smallest power of two s with largest / s <= limit, built from its exponent bits."""
    exponent = torch.ceil(torch.log2(largest.float().clamp_min(2.0 ** -100) / limit)).clamp(-126, 127).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


def fp4_rounded(w):
    """E2M1 with a power-of-two scale per 32 columns, ties to even."""
    blocks = w.float().reshape(-1, 32)
    scale = power_of_two_ceil(blocks.abs().amax(-1, keepdim=True), 6.0)
    x = (blocks / scale).clamp(-6, 6)
    magnitude = x.abs()
    step = 0.5 + 0.5 * (magnitude >= 2).float() + 1.0 * (magnitude >= 4).float()
    return (torch.round(x / step) * step * scale).reshape(w.shape)


def fp8_rounded(w):
    """E4M3 with a power-of-two scale per 128 x 128 cell."""
    rows, cols = w.shape
    blocks = w.float().reshape(rows // 128, 128, cols // 128, 128)
    scale = power_of_two_ceil(blocks.abs().amax((1, 3), keepdim=True), 448.0)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(rows, cols)


def cache_rounded(x):
    """E4M3 with a power-of-two scale per 64 channels, as the official code rounds KV rows."""
    blocks = x.float().unflatten(-1, (-1, 64))
    scale = power_of_two_ceil(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass; the gradient passes as if nothing had happened."""
    @staticmethod
    def forward(ctx, x, rounding):
        return rounding(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def maybe(w, rounding, on):
    return StraightThrough.apply(w, rounding) if on else w


def linear_forward(self, x):
    return F.linear(x, maybe(self.weight, fp8_rounded, Switches.weights))


def grouped_forward(self, x):
    """The block-diagonal output projection: group g's rows of the weight see group g's inputs."""
    weight = maybe(self.weight, fp8_rounded, Switches.weights).view(self.n_groups, -1, x.shape[-1]).transpose(1, 2)
    y = torch.bmm(x.reshape(-1, self.n_groups, x.shape[-1]).transpose(0, 1), weight).transpose(0, 1)
    return y.reshape(*x.shape[:-2], self.n_groups, -1)


def cache_norm_forward(rotary_width):
    def forward(self, x):
        y = type(self).forward(self, x)
        if not Switches.cache: return y
        # rotation touches only the last channels, so the others may be rounded before it
        return torch.cat([StraightThrough.apply(y[..., :-rotary_width], cache_rounded), y[..., -rotary_width:]], -1)
    return forward


def experts_forward(self, hidden_states, input_ids=None, **_):
    """All experts for all tokens, weighted by the routing (0 for those not chosen): two large products, no host synchronization."""
    batch, length, width = hidden_states.shape
    flat = hidden_states.reshape(-1, width)
    _, weights, chosen = self.gate(hidden_states, input_ids) if self.is_hash else self.gate(hidden_states)
    up_weight, down_weight = self.experts.gate_up_proj, self.experts.down_proj
    count, limit = up_weight.shape[0], self.experts.limit
    with torch.no_grad():
        self.tokens_by_expert += torch.zeros_like(self.tokens_by_expert).scatter_add_(
            0, chosen.reshape(-1), torch.ones(chosen.numel(), device=chosen.device))
    mix = torch.zeros(flat.shape[0], count, dtype=weights.dtype, device=flat.device).scatter(1, chosen, weights)
    up_weight = maybe(up_weight, fp4_rounded, Switches.weights); down_weight = maybe(down_weight, fp4_rounded, Switches.weights)
    both = F.linear(flat, up_weight.reshape(-1, width)).view(flat.shape[0], count, 2, -1)
    inner = F.silu(both[:, :, 0].clamp(max=limit)) * both[:, :, 1].clamp(-limit, limit)
    inner = (inner * mix.to(inner.dtype).unsqueeze(-1)).reshape(flat.shape[0], -1)
    routed = F.linear(inner, down_weight.permute(1, 0, 2).reshape(width, -1))
    return routed.view(batch, length, width) + self.shared_experts(hidden_states)


def scorer_forward(self, q, compressed_kv, hidden_states):
    """The index scores by one product per sequence instead of one per token."""
    batch, length, heads, width = q.shape
    scores = torch.bmm(q.reshape(batch, length * heads, width).float(), compressed_kv.transpose(-1, -2).float()).view(batch, length, heads, -1)
    weights = self.weights_proj(hidden_states).float() * self.weights_scaling
    return (F.relu(scores) * self.softmax_scale * weights.unsqueeze(-1)).sum(dim=2)


def install(model, config, fast=True):
    """Replaces the forwards of the FP8 matrices and KV norms of `model`, and, if `fast`, of expert layers and index scores, by the ones above."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        dense = [attention.q_a_proj, attention.q_b_proj, attention.kv_proj, attention.o_b_proj,
                 mlp.shared_experts.gate_proj, mlp.shared_experts.up_proj, mlp.shared_experts.down_proj]
        norms, compressor = [attention.kv_norm], attention.compressor
        if compressor is not None:
            norms.append(compressor.kv_norm)
            if hasattr(compressor, "indexer"):
                dense.append(compressor.indexer.q_b_proj)
                if fast: compressor.indexer.scorer.forward = types.MethodType(scorer_forward, compressor.indexer.scorer)
        for module in dense: module.forward = types.MethodType(linear_forward, module)
        attention.o_a_proj.forward = types.MethodType(grouped_forward, attention.o_a_proj)
        for module in norms: module.forward = types.MethodType(cache_norm_forward(config["qk_rope_head_dim"]), module)
        mlp.tokens_by_expert = torch.zeros(config["n_routed_experts"], device=mlp.gate.weight.device)
        if fast: mlp.forward = types.MethodType(experts_forward, mlp)


def uninstall(model):
    """Gives every module its own class's forward back."""
    for module in model.modules(): module.__dict__.pop("forward", None)
