"""Reads published training runs from a CSV file: each row a job, a layout and what was measured."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from outsize.cluster.catalog import find_device, with_memory
from outsize.cluster.link import Link
from outsize.cluster.topology import Cluster, Machine
from outsize.cost.layout import V_SHAPED, Job, Layout
from outsize.cost.software import Software, find_software
from outsize.errors import OutsizeError
from outsize.model.transformer_profile import TransformerConfig, spread_vocabulary, transformer_profile
from outsize.plan.plan import Mesh, OptimizerSpec
from outsize.units import GIB

__all__ = ["PublishedRun", "Unmodelled", "load_runs", "read_run"]

_GB = 10**9
_SHARDINGS = {"1": "optimizer_states", "2": "gradients", "3": "full"}
_SCHEDULES = {
    "": "1f1b", "none": "1f1b", "1f1b": "1f1b", "interleaved-1f1b": "interleaved_1f1b", "zb-1p": "zb_h1",
    "zb-2p": "zb_2p", "zb-v": "zb_v", "v-half": "v_half", "gpipe": "gpipe",
}  # fmt: skip
_NEEDED = ("layers", "hidden", "heads", "seq_len", "gpus", "tp", "pp", "micro_batch", "global_batch")
_GATED = ("Llama", "llama", "Qwen", "Mistral", "Mixtral", "DeepSeek", "Kimi")


class Unmodelled(Exception):  # noqa: N818 - a reason, not an error
    """A row that cannot be predicted, with the reason."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row: what was run, and what its source measured (None where it did not)."""

    row: int
    source: str
    software: str
    job: Job
    layout: Layout
    recompute: str
    step_time_s: float | None
    memory_bytes: float | None
    counts_context: bool  # memory as nvidia-smi shows it: with the driver's context
    ran_out_of_memory: bool


@dataclass(frozen=True, slots=True)
class _Source:
    match: str = ""
    software: str = ""
    software_fully_sharded: str = ""  # for rows of ZeRO stage 3
    network: float | None = None
    memory: str = ""
    time: str = ""  # why step times of this source say nothing, if they do not
    flops: str = ""
    recompute: str = ""
    zero_stage: str = ""  # where the column is blank
    vocabulary: int = 51200  # where the column is blank: GPT-2's, padded


@cache
def _sources() -> tuple[_Source, ...]:
    text = files("outsize.planner").joinpath("published_runs.toml").read_text(encoding="utf-8")
    return tuple(_Source(**figures) for figures in tomllib.loads(text)["sources"])


def load_runs(path: Path) -> tuple[list[PublishedRun], list[tuple[int, str]]]:
    """Return the runs of a CSV file and, for rows that cannot be modelled, their number and the reason.

    Raises:
        OutsizeError: the file cannot be read or lacks the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = str(error.strerror) if isinstance(error, OSError) else str(error)
        raise OutsizeError(
            f"The runs in {path} cannot be read.", why=why, attempt="a CSV file, one line a run"
        ) from None
    missing = [name for name in (*_NEEDED, "source", "gpu") if not rows or name not in rows[0]]
    if missing:
        raise OutsizeError(
            f"{path} holds no runs.",
            why=f"no column {', '.join(missing)}",
            attempt="a CSV file with a line of these names, and one line a run",
        )
    runs, refused = [], []
    for number, row in enumerate(rows, start=2):
        try:
            runs.append(read_run(row, number))
        except Unmodelled as reason:
            refused.append((number, str(reason)))
        except (ValueError, ZeroDivisionError, OverflowError) as fault:
            refused.append((number, f"a figure cannot be read: {fault}"))
    return runs, refused


def read_run(row: Mapping[str, str], number: int) -> PublishedRun:
    """Return the run of one row; raise Unmodelled with the reason if it says too little."""
    blank = [name for name in _NEEDED if not row[name]]
    if blank:
        raise Unmodelled(f"not published: {', '.join(blank)}")
    source = _source_of(row)
    name = source.software
    if row.get("zero_stage") == "3" and source.software_fully_sharded:
        name = source.software_fully_sharded
    spreads = "vocabulary layers sharded over all stages" in row.get("notes", "")
    if spreads:
        name = "vocabulary_parallelism_spread"
    software = find_software(name)
    if "extra 4 bytes/param" in row.get("notes", ""):
        software = replace(software, gradient_bytes=6.0)
    config = _config(row, software)
    precision = _precision(row["precision"])
    profile = transformer_profile(config, _int(row["seq_len"]))
    if spreads:
        profile = spread_vocabulary(profile)
    job = Job(
        profile=profile,
        cluster=_cluster(row, source),
        global_batch=_int(row["global_batch"]),
        optimizer=OptimizerSpec(),
        precision=precision,
        software=software,
    )
    layout = _layout(row, source)
    if spreads:
        layout = replace(layout, schedule="vocabulary_1f1b" if layout.schedule == "1f1b" else layout.schedule)
    out_of_memory = "OOM on" in row.get("notes", "") or "published as OOM" in row.get("notes", "")
    step_time_s = None if out_of_memory or source.time else _step_time_s(row, job, source)
    memory = _memory_bytes(row, source)
    if step_time_s is None and memory is None and not out_of_memory:
        raise Unmodelled("neither time nor memory is stated")
    return PublishedRun(
        row=number,
        source=row["source"],
        software=name,
        job=job,
        layout=layout,
        recompute=_recompute(row, source),
        step_time_s=step_time_s,
        memory_bytes=memory,
        counts_context="nvidia_smi" in source.memory,
        ran_out_of_memory=out_of_memory,
    )


def _source_of(row: Mapping[str, str]) -> _Source:
    text = f"{row['source']} {row.get('table', '')}"
    return next((source for source in _sources() if source.match in text), _Source())


def _int(text: str) -> int:
    return int(float(text))


def _config(row: Mapping[str, str], software: Software) -> TransformerConfig:
    """Sizes from the columns; whether the MLP is gated follows from the number of parameters."""
    experts = _int(row.get("experts") or "0")
    ffn = _int(row["ffn_hidden"]) if row["ffn_hidden"] else 4 * _int(row["hidden"])
    config = TransformerConfig(
        name=row["model"],
        num_layers=_int(row["layers"]),
        hidden=_int(row["hidden"]),
        num_heads=_int(row["heads"]),
        vocab=_vocabulary(row),
        sequence=_int(row["seq_len"]),
        ffn_hidden=ffn,
        num_kv_heads=_int(row["kv_heads"]) if row["kv_heads"] else 0,
        is_tied="GPT" in row["model"] and not experts and software.ties_embeddings,
        fused_attention=software.fused_attention,
        dropout=software.dropout,
        kept_mlp_copies=software.kept_mlp_copies,
        kept_norm_bytes=software.kept_norm_bytes,
    )
    if experts:
        return _with_experts(config, row["model"], experts, ffn)
    if any(name in row["model"] for name in _GATED):
        return replace(config, is_gated=True)
    if not row["params_b"]:
        return config
    published = float(row["params_b"]) * 1e9
    choices = [replace(config, is_gated=gated) for gated in (False, True)]
    return min(choices, key=lambda each: abs(transformer_profile(each, 1).num_parameters - published))


def _vocabulary(row: Mapping[str, str]) -> int:
    return _int(row["vocab"]) if row["vocab"] else _source_of(row).vocabulary


def _with_experts(config: TransformerConfig, model: str, experts: int, ffn: int) -> TransformerConfig:
    active = {"DeepSeek": 8, "Kimi": 8, "Qwen3": 8, "GPT-OSS": 4, "Mixtral": 2}
    known = next((count for name, count in active.items() if name in model), None)
    if known is None:
        raise Unmodelled("how many experts are active is not stated")
    mixed = replace(
        config,
        is_gated=True,
        is_tied=False,
        num_experts=experts,
        num_active_experts=known,
        expert_hidden=ffn,
    )
    if "DeepSeek" in model or "Kimi" in model:
        dense = 3 if "DeepSeek" in model else 1
        return replace(
            mixed,
            num_shared_experts=1,
            num_dense_layers=dense,
            ffn_hidden=18432,
            head_dim=128,
            query_rank=1536,
            key_value_rank=512,
            rotary_dim=64,
            max_machines_per_token=4 if "DeepSeek" in model else 0,
        )
    return replace(mixed, head_dim=64 if "GPT-OSS" in model else 128)


def _precision(text: str) -> str:
    if "fp4" in text:
        raise Unmodelled(f"precision {text}")
    if "fp8" in text:
        return "fp8"
    return text if text in {"fp16", "bf16", "fp32"} else "bf16"


_DEVICES = {
    "A100-SXM": "A100", "A100-PCIe": "A100-PCIe", "H100-SXM": "H100", "B200": "B200", "B300": "B300",
    "GB200": "GB200", "GB300": "GB300", "V100": "V100", "MI300X": "MI300X", "H200": "H200",
    "H100-PCIe": "H100-PCIe",
}  # fmt: skip


def _cluster(row: Mapping[str, str], source: _Source) -> Cluster:
    gpu = row["gpu"]
    name = (
        "H100-HBM2e"
        if "HBM2e" in gpu
        else next(
            (_DEVICES[key] for key in sorted(_DEVICES, key=len, reverse=True) if gpu.startswith(key)), gpu
        )
    )
    try:
        entry = find_device(name)
    except OutsizeError as error:
        raise Unmodelled(f"unknown device {gpu}") from error
    device = entry.device
    if row.get("gpu_mem_gb"):
        device = with_memory(device, round(float(row["gpu_mem_gb"]) * GIB))
    count, usual = _int(row["gpus"]), entry.devices_per_machine
    if count <= usual:
        return Cluster((Machine((device,) * count, entry.link),), argument=f"{count}x{name}")
    usual = max(size for size in range(1, usual + 1) if count % size == 0)
    network = entry.network
    if source.network is not None:
        network = Link("as published", source.network * 1e9, network.latency_s)
    machine = Machine((device,) * usual, entry.link)
    return Cluster((machine,) * (count // usual), network, argument=f"{count}x{name}")


def _layout(row: Mapping[str, str], source: _Source) -> Layout:
    tp, pp, cp, ep = (_int(row.get(name) or "1") for name in ("tp", "pp", "cp", "ep"))
    devices, size = _int(row["gpus"]), _int(row["micro_batch"])
    if devices % (tp * pp * cp):
        raise Unmodelled("the degrees do not divide the number of devices")
    replicas = devices // (tp * pp * cp)
    if replicas % ep:
        raise Unmodelled("expert parallelism reaches over other axes than data parallelism")
    batch = _int(row["global_batch"])
    schedule = row["schedule"]
    if schedule not in _SCHEDULES:
        raise Unmodelled(f"schedule {schedule!r} is not modelled")
    schedule, virtual = _schedule(_SCHEDULES[schedule], _int(row.get("vpp") or "1"))
    level = _SHARDINGS.get(row.get("zero_stage") or source.zero_stage, "none")
    dp = replicas // ep
    return Layout(
        mesh=Mesh(
            pp=pp, dp=1 if level != "none" else dp, fsdp=dp if level != "none" else 1, cp=cp, tp=tp, ep=ep
        ),
        microbatch_size=size,
        num_microbatches=max(round(batch / (replicas * size)), 1),
        schedule=schedule if pp > 1 else "1f1b",
        num_virtual_stages=virtual if pp > 1 else 1,
        state_sharding=level,
        sequence_parallel=row.get("sequence_parallel") != "no" and tp > 1,
    )


def _schedule(schedule: str, virtual: int) -> tuple[str, int]:
    """A schedule with the virtual stages it has: two in a V, several where interleaved, else one."""
    if schedule in V_SHAPED:
        return schedule, 2
    if schedule in {"1f1b", "interleaved_1f1b"}:
        return ("interleaved_1f1b" if virtual > 1 else "1f1b"), virtual
    if virtual > 1:
        raise Unmodelled(f"schedule {schedule} with {virtual} virtual stages is not modelled")
    return schedule, 1


def _recompute(row: Mapping[str, str], source: _Source) -> str:
    text = row.get("recompute") or source.recompute
    if text in {"none", "full"}:
        return text
    if text.startswith("selective") or text == "core_attn":
        return "selective"
    raise Unmodelled(
        "what is recomputed is not published" if not text else f"recomputation {text!r} is not modelled"
    )


def _step_time_s(row: Mapping[str, str], job: Job, source: _Source) -> float | None:
    """Seconds of a step: as printed, else from tokens/s, else from TFLOP/s by the source's convention."""
    devices, tokens = _int(row["gpus"]), job.global_batch * job.profile.tokens_per_sample
    if row.get("iter_time_s"):
        return float(row["iter_time_s"])
    if row.get("tokens_per_s_per_gpu"):
        return tokens / (float(row["tokens_per_s_per_gpu"]) * devices)
    rate = float(row["tflops_per_gpu"]) * 1e12 if row.get("tflops_per_gpu") else 0.0
    if not rate and row.get("mfu") and row.get("peak_tflops"):
        rate = float(row["mfu"]) / 100 * float(row["peak_tflops"]) * 1e12
    return tokens * _flops_per_token(row, job, source) / (rate * devices) if rate else None


def _flops_per_token(row: Mapping[str, str], job: Job, source: _Source) -> float:
    layers, hidden, sequence = (_int(row[name]) for name in ("layers", "hidden", "seq_len"))
    vocab = _vocabulary(row)
    if source.flops == "full_recompute":
        share = 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
        return 96.0 * layers * hidden**2 * share
    if source.flops == "vocabulary":
        return hidden * (72.0 * hidden + 12 * sequence) * layers + 6.0 * hidden * vocab
    active = _active_parameters(job)
    return 6.0 * active + 12.0 * layers * hidden * sequence


def _active_parameters(job: Job) -> float:
    """Parameters a token meets: a third of matrix FLOPs of forward and backward, attention left out."""
    flops = 0.0
    for block in job.profile.blocks:
        matmuls = (each for each in block.operators if each.kind == "matmul")
        flops += sum(operator.forward_flops.per_sample for operator in matmuls)
    return flops / 2 / job.profile.tokens_per_sample


def _memory_bytes(row: Mapping[str, str], source: _Source) -> float | None:
    if not row.get("mem_gb_per_gpu") or not source.memory:
        return None
    return float(row["mem_gb_per_gpu"]) * (GIB if source.memory.endswith("gib") else _GB)
