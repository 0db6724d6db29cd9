"""The profile of a transformer from its published sizes alone: formulas, no model and no torch.

Bytes are for 2-byte activations. A layer keeps what Korthikanti et al. (2022) count: 34 s h a sample with
masks for dropout, plus 5 a s² for unfused attention; written out per value here, so that gated MLPs,
grouped heads and experts are counted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from outsize.model.profile import Amount, BlockProfile, ModelProfile, OperatorProfile

__all__ = ["TransformerConfig", "spread_vocabulary", "transformer_profile"]

ELEMENT = 2  # bytes


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Sizes of a decoder-only, encoder-only or encoder-decoder transformer."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    sequence: int
    ffn_hidden: int = 0  # 0: four times hidden
    num_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden ÷ heads
    is_gated: bool = False  # gate and up projections, as in SwiGLU
    is_causal: bool = True
    is_tied: bool = False  # head shares the embedding
    learned_positions: bool = False
    num_encoder_layers: int = 0  # these come first, and decoder layers then attend to them
    # mixture of experts
    num_experts: int = 0
    num_active_experts: int = 0
    num_shared_experts: int = 0
    expert_hidden: int = 0
    num_dense_layers: int = 0  # first layers without experts
    max_machines_per_token: int = 0  # node-limited routing
    # multi-head latent attention
    query_rank: int = 0
    key_value_rank: int = 0
    rotary_dim: int = 0
    # how it is run
    fused_attention: bool = True
    dropout: bool = False
    kept_mlp_copies: int = 0  # of ffn_hidden, kept for backward; 0: 3 if gated, else 2
    kept_norm_bytes: int = 2  # a norm keeps of each value of its input

    @property
    def ffn(self) -> int:
        """Width of the dense MLP."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def width_of_head(self) -> int:
        """Size of one head."""
        return self.head_dim or self.hidden // self.num_heads


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a layer: parameters, operators, and bytes kept (split over tp, or whole) a token."""

    parameters: int
    operators: tuple[OperatorProfile, ...]
    split_bytes: float = 0.0
    whole_bytes: float = 0.0
    experts: int = 0
    score_bytes: float = 0.0  # of unfused attention, kept a token
    score_flops: float = 0.0
    score_traffic: float = 0.0
    input_bytes: float = 0.0  # of matrix products, part of the above
    widest: int = 0  # widest intermediate, for temporaries


def _matmul(tokens: float, inner: int, columns: int, split: str, num_experts: int = 1) -> OperatorProfile:
    return OperatorProfile(
        "matmul",
        Amount(2.0 * tokens * inner * columns),
        Amount(ELEMENT * (tokens * (inner + columns)), ELEMENT * float(num_experts) * inner * columns),
        Amount(tokens / num_experts),
        inner,
        columns,
        split,
        num_experts,
    )


def _elementwise(tokens: float, bytes_per_token: float, split: str) -> OperatorProfile:
    return OperatorProfile("elementwise", Amount(), Amount(tokens * bytes_per_token), split=split)


def transformer_profile(config: TransformerConfig, sequence: int | None = None) -> ModelProfile:
    """Return the profile of ``config`` for samples of ``sequence`` tokens (default: the config's own)."""
    tokens = sequence or config.sequence
    crosses = config.num_encoder_layers > 0
    encoder = _layer(config, tokens, "encoder", has_experts=False, crosses=False)
    dense = _layer(config, tokens, "layers", has_experts=False, crosses=crosses)
    mixed = (
        _layer(config, tokens, "layers", has_experts=True, crosses=crosses) if config.num_experts else dense
    )
    layers = [_named(encoder, f"encoder.{index}") for index in range(config.num_encoder_layers)]
    for index in range(config.num_layers):
        layers.append(_named(dense if index < config.num_dense_layers else mixed, f"layers.{index}"))
    blocks = [_embedding(config, tokens), *layers, _head(config, tokens)]
    return ModelProfile(
        config.name, tuple(blocks), tokens_per_sample=tokens, rung="formulas", bytes_per_element=ELEMENT
    )


def _kept_for_weights(operators: tuple[OperatorProfile, ...]) -> Amount:
    """Return the bytes of what products with weights take and of the gradients of what they give."""
    products = [operator for operator in operators if operator.kind == "matmul"]
    values = (each.rows.per_sample * each.num_experts * (each.inner + each.columns) for each in products)
    return Amount(ELEMENT * sum(values))


def _named(layer: BlockProfile, name: str) -> BlockProfile:
    return replace(layer, name=name, cut_label=name, parameter_names=(f"{name}.weight",))


def _attention(config: TransformerConfig, tokens: int, *, is_causal: bool) -> _Part:
    h, d, heads, kv = config.hidden, config.width_of_head, config.num_heads, config.kv_heads
    if config.key_value_rank:
        parameters, projections = _latent_projections(config, tokens)
        d = config.width_of_head + config.rotary_dim
        kept = ELEMENT * (heads * (2 * d + 2 * config.width_of_head))
    else:
        parameters = h * (heads + 2 * kv) * d + heads * d * h
        projections = (
            _matmul(tokens, h, (heads + 2 * kv) * d, "columns"),
            _matmul(tokens, heads * d, h, "rows"),
        )
        kept = ELEMENT * (heads + 2 * kv + heads) * d
    flops = 4.0 * tokens * tokens * heads * d * (0.5 if is_causal and config.fused_attention else 1.0)
    scores = 0.0 if config.fused_attention else heads * tokens * (2.0 * ELEMENT + 1)
    traffic, passes = ELEMENT * heads * (4.0 * d + 2.0 * tokens), 0.0
    if config.fused_attention:
        core = [OperatorProfile("attention", Amount(flops), Amount(), split="heads")]
    else:  # scores are written and read by two products; between them masked softmax, and dropout
        passes = (2 * ELEMENT + config.dropout * (2 * ELEMENT + 1)) * heads * tokens
        core = [
            OperatorProfile("scores", Amount(flops), Amount(tokens * traffic), split="heads"),
            _elementwise(tokens, passes, "heads"),
        ]
    if not config.learned_positions and config.is_gated:  # rotary: read and write queries and keys
        core.append(_elementwise(tokens, 2 * ELEMENT * (heads + kv) * d, "heads"))
    return _Part(
        parameters=parameters,
        operators=(projections[0], *core, *projections[1:]),
        split_bytes=kept,
        whole_bytes=(ELEMENT + config.dropout) * h,
        input_bytes=ELEMENT * (h + heads * config.width_of_head),
        score_bytes=scores,
        score_flops=0.0 if config.fused_attention else flops,
        score_traffic=0.0 if config.fused_attention else tokens * (traffic + passes),
        widest=max((heads + 2 * kv) * d, 0 if config.fused_attention else heads * tokens),
    )


def _latent_projections(config: TransformerConfig, tokens: int) -> tuple[int, tuple[OperatorProfile, ...]]:
    """Low-rank queries, keys and values of DeepSeek-V2/V3."""
    h, heads, rope = config.hidden, config.num_heads, config.rotary_dim
    query, latent, value = config.query_rank, config.key_value_rank, config.width_of_head
    sizes = [
        (h, query, "none"),
        (query, heads * (value + rope), "columns"),
        (h, latent + rope, "none"),
        (latent, heads * 2 * value, "columns"),
        (heads * value, h, "rows"),
    ]
    return sum(inner * columns for inner, columns, _ in sizes), tuple(
        _matmul(tokens, inner, columns, split) for inner, columns, split in sizes
    )


def _mlp(config: TransformerConfig, tokens: int) -> _Part:
    h, f = config.hidden, config.ffn
    ups = 2 if config.is_gated else 1
    copies = config.kept_mlp_copies or (3 if config.is_gated else 2)
    return _Part(
        parameters=(ups + 1) * h * f,
        operators=(
            _matmul(tokens, h, ups * f, "columns"),
            _elementwise(tokens, ELEMENT * (ups + 1) * f, "columns"),
            _matmul(tokens, f, h, "rows"),
        ),
        split_bytes=ELEMENT * copies * f,
        whole_bytes=(ELEMENT + config.dropout) * h,
        input_bytes=ELEMENT * (h + f),
        widest=ups * f,
    )


def _experts(config: TransformerConfig, tokens: int) -> _Part:
    h, f, active = config.hidden, config.expert_hidden or config.ffn, config.num_active_experts
    ups = 2 if config.is_gated else 1
    each = (ups + 1) * h * f
    copies = config.kept_mlp_copies or (3 if config.is_gated else 2)
    routed = float(tokens) * active

    shared = config.num_shared_experts
    dense = (
        (_matmul(tokens, h, shared * ups * f, "columns"), _matmul(tokens, shared * f, h, "rows"))
        if shared
        else ()
    )
    return _Part(
        parameters=h * config.num_experts + (config.num_experts + shared) * each,
        operators=(
            _matmul(tokens, h, config.num_experts, "none"),
            _matmul(routed, h, ups * f, "columns", config.num_experts),
            _elementwise(routed, ELEMENT * ((ups + 1) * f + 4 * h), "columns"),
            _matmul(routed, f, h, "rows", config.num_experts),
            *dense,
        ),
        split_bytes=ELEMENT * (active + shared) * copies * f,
        whole_bytes=ELEMENT * h * (1 + 2 * active),
        input_bytes=ELEMENT * (active * (h + f)),
        experts=config.num_experts * each,
        widest=ups * f * active,
    )


def _layer(
    config: TransformerConfig, tokens: int, name: str, *, has_experts: bool, crosses: bool
) -> BlockProfile:
    """Norms, attention (and attention to the encoder), and an MLP or experts."""
    h = config.hidden
    is_encoder = name.startswith("encoder")
    attentions = [_attention(config, tokens, is_causal=config.is_causal and not is_encoder)]
    if crosses:
        attentions.append(_attention(config, tokens, is_causal=False))
    feed = _experts(config, tokens) if has_experts else _mlp(config, tokens)
    parts = [*attentions, feed]
    # each part: norm (read, write) and residual with dropout (read two, write one, mask)
    passes = _elementwise(tokens, len(parts) * (5 * ELEMENT + config.dropout) * h, "tokens")
    operators = (*(operator for part in parts for operator in part.operators), passes)
    norms = len(parts) * h
    parameters = sum(part.parameters for part in parts) + norms
    whole = sum(part.whole_bytes for part in parts) + len(parts) * config.kept_norm_bytes * h
    inputs = sum(part.input_bytes for part in parts)
    split = sum(part.split_bytes for part in parts)
    scores = sum(part.score_bytes for part in parts)
    forward = sum(operator.forward_flops.per_sample for operator in operators)
    kind = "encoder" if is_encoder else "experts" if has_experts else "layer"
    return BlockProfile(
        name=name,
        kind=kind,
        num_parameters=parameters,
        num_trainable_parameters=parameters,
        parameter_bytes=ELEMENT * parameters,
        forward_flops=Amount(forward),
        backward_flops=Amount(2 * forward),
        bytes_moved=Amount(sum(operator.bytes_moved.per_sample for operator in operators)),
        saved_activation_bytes=Amount(tokens * (whole + split + scores)),
        selective_saved_bytes=Amount(tokens * (whole + split)),
        selective_recompute_flops=Amount(sum(part.score_flops for part in parts)),
        selective_recompute_bytes=Amount(sum(part.score_traffic for part in parts)),
        recompute_input_bytes=Amount(ELEMENT * tokens * h),
        weight_gradient_bytes=_kept_for_weights(operators),
        temporary_bytes=Amount(2.0 * ELEMENT * tokens * max(part.widest for part in parts)),
        output_bytes=Amount(ELEMENT * tokens * h * (2 if crosses else 1)),
        shardable_parameter_fraction=1 - norms / parameters,
        shardable_activation_fraction=(split + scores) / (whole + split + scores),
        shardable_flops_fraction=1.0,
        context_exchange_bytes=Amount(
            len(attentions) * 2.0 * ELEMENT * tokens * config.kv_heads * config.width_of_head
        ),
        matmul_input_fraction=inputs / (whole + split + scores),
        num_forward_all_reduces=len(parts),
        all_reduce_bytes=Amount(ELEMENT * tokens * h),
        max_tensor_parallel_degree=gcd(config.num_heads, config.ffn),
        operators=operators,
        num_expert_parameters=sum(part.experts for part in parts),
        all_to_all_bytes=Amount(ELEMENT * tokens * h * config.num_active_experts if has_experts else 0.0),
        num_token_copies=max(config.num_active_experts, 1),
        max_machines_per_token=config.max_machines_per_token,
    )


def _embedding(config: TransformerConfig, tokens: int) -> BlockProfile:
    h = config.hidden
    parameters = config.vocab * h + (config.sequence * h if config.learned_positions else 0)
    passes = _elementwise(tokens, 4 * ELEMENT * h, "tokens")
    return BlockProfile(
        name="embedding",
        kind="embedding",
        num_parameters=parameters,
        num_trainable_parameters=parameters,
        parameter_bytes=ELEMENT * parameters,
        forward_flops=Amount(),
        backward_flops=Amount(),
        bytes_moved=passes.bytes_moved,
        saved_activation_bytes=Amount(8.0 * tokens + config.dropout * tokens * h),
        recompute_input_bytes=Amount(8.0 * tokens),
        temporary_bytes=Amount(ELEMENT * tokens * h),
        output_bytes=Amount(ELEMENT * tokens * h),
        parameter_names=("embedding.weight",),
        shardable_parameter_fraction=1.0,
        shardable_activation_fraction=0.0,
        num_forward_all_reduces=1,
        all_reduce_bytes=Amount(ELEMENT * tokens * h),
        max_tensor_parallel_degree=gcd(config.num_heads, config.ffn),
        operators=(passes,),
    )


def _head(config: TransformerConfig, tokens: int) -> BlockProfile:
    """Final norm, projection to the vocabulary and cross-entropy in float32."""
    h, vocab = config.hidden, config.vocab
    projection = _matmul(tokens, h, vocab, "columns")
    # float32 copy (read 2, write 4), largest (read 4), exponential of the difference (8), sum (4)
    loss = _elementwise(tokens, 22.0 * vocab, "columns")
    norm = _elementwise(tokens, 2 * ELEMENT * h, "tokens")
    own = h + (0 if config.is_tied else vocab * h)
    kept_whole, kept_split = 2 * ELEMENT * h, 4.0 * vocab
    return BlockProfile(
        name="head",
        kind="head",
        num_parameters=own,
        num_trainable_parameters=own,
        parameter_bytes=ELEMENT * own,
        forward_flops=projection.forward_flops,
        backward_flops=projection.forward_flops.scaled(2),
        bytes_moved=Amount(projection.bytes_moved.per_sample + loss.bytes_moved.per_sample),
        saved_activation_bytes=Amount(tokens * (kept_whole + kept_split)),
        recompute_input_bytes=Amount(tokens * (kept_whole + kept_split)),
        weight_gradient_bytes=_kept_for_weights((projection,)),
        temporary_bytes=Amount(float(ELEMENT) * tokens * vocab),
        output_bytes=Amount(8.0),
        cut_label="head",
        parameter_names=("head.norm",) if config.is_tied else ("head.norm", "head.weight"),
        tied_parameter_names=("embedding.weight",) if config.is_tied else (),
        num_tied_parameters=vocab * h if config.is_tied else 0,
        shardable_parameter_fraction=0.0 if config.is_tied else 1 - h / own,
        shardable_activation_fraction=kept_split / (kept_whole + kept_split),
        shardable_flops_fraction=1.0,
        num_forward_all_reduces=1,
        all_reduce_bytes=Amount(8.0 * tokens),
        max_tensor_parallel_degree=gcd(config.num_heads, config.ffn),
        operators=(norm, projection, loss),
    )


def spread_vocabulary(profile: ModelProfile) -> ModelProfile:
    """Return the profile with embedding and head cut evenly over the layers (Vocabulary Parallelism)."""
    embedding, *layers, head = profile.blocks
    share = 1 / len(layers)
    extra = round((embedding.num_parameters + head.num_parameters + head.num_tied_parameters) * share)
    pieces = tuple(
        replace(
            operator,
            forward_flops=operator.forward_flops.scaled(share),
            bytes_moved=operator.bytes_moved.scaled(share),
            columns=round(operator.columns * share),
        )
        for operator in head.operators
    )
    spread = [
        replace(
            layer,
            num_parameters=layer.num_parameters + extra,
            num_trainable_parameters=layer.num_trainable_parameters + extra,
            forward_flops=layer.forward_flops + head.forward_flops.scaled(share),
            backward_flops=layer.backward_flops + head.backward_flops.scaled(share),
            operators=(*layer.operators, *pieces),
        )
        for layer in layers
    ]
    kept = head.saved_activation_bytes.scaled(share)
    first = replace(embedding, num_parameters=0, num_trainable_parameters=0)
    last = replace(
        head,
        num_parameters=0,
        num_trainable_parameters=0,
        num_tied_parameters=0,
        tied_parameter_names=(),
        operators=head.operators[:1],
        saved_activation_bytes=kept,
    )
    return replace(profile, blocks=(first, *spread, last))
