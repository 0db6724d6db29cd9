"""Prints as JSON how long models take to be recorded and profiled, and how much memory that needs.

    python benchmarks/recording.py

Each model is built from its published sizes without memory, recorded at two batch sizes and profiled, in a
process of its own with one thread. Imports are done before and counted apart.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_embd": 768,
        "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    },
    "llama3-405b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
_MIB = 2**20


def measure(config: str) -> dict[str, float]:
    """Profile the model of a configuration file once; seconds and MiB."""
    import transformers

    from outsize.model.argument import load_model
    from outsize.model.profiling import profile_model

    source = load_model(f"hf:{config}")
    architecture = json.loads(Path(config).read_text())["architectures"][0]
    getattr(transformers, architecture)  # its module is imported here
    imports_mib = _peak_mib()
    processor_s, clock_s = time.process_time(), time.perf_counter()
    profile = profile_model(source)
    return {
        "num_parameters": profile.num_parameters,
        "num_blocks": len(profile.blocks),
        "processor_s": round(time.process_time() - processor_s, 2),
        "clock_s": round(time.perf_counter() - clock_s, 2),
        "peak_mib": round(_peak_mib()),
        "imports_mib": round(imports_mib),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB


def main() -> None:
    """Measure every model in its own process, the median processor time of three."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    found = {}
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(settings))
            runs = [
                json.loads(
                    subprocess.run(
                        [sys.executable, __file__, str(config)],
                        env=environment, check=True, capture_output=True, text=True, timeout=300,
                    ).stdout
                )
                for _ in range(3)
            ]  # fmt: skip
        found[name] = sorted(runs, key=lambda run: run["processor_s"])[1]
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
