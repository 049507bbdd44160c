"""Plans in other frameworks' words: what they hold, what is said to be missing, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from hetctl.comm.contract.errors import ConfigError
from hetctl.render.for_others import for_framework
from tests.hetctl.process import hetctl
from tests.layouts import Cut, Layout, Pipe, plan_of

STAGES = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 5), (0, 1), 2), Cut((5, 8), (2, 3), 2)), 4, 3),))
REPLICAS = Layout(((0,), (1,)), (Pipe((Cut((0, 8), (0,), recompute="full"),), 2, 5), Pipe((Cut((0, 8), (1,)),), 2, 3)))
TURNS = Layout(
    ((0,), (1,)), (Pipe(tuple(Cut((2 * n, 2 * n + 2), (n % 2,)) for n in range(4)), 1, 4),), schedule="interleaved"
)
BACKWARDS = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 5), (2, 3)), Cut((5, 8), (0, 1))), 2, 4),), schedule="zero-bubble")
UNLIKE = Layout(((0, 1), (2,)), (Pipe((Cut((0, 5), (0, 1), 2), Cut((5, 8), (2,))), 2, 4),))


def written(layout: Layout, framework: str, precision: str = "bf16") -> tuple[str, str]:
    found = for_framework(plan_of(layout, seq_len=64), framework, precision)  # type: ignore[arg-type]
    return found.text, "\n".join(found.lacks)


def torchtitans(text: str) -> dict[str, object]:
    """The arguments that its file makes its objects of."""
    names: dict[str, object] = {}
    body = text.partition('"""\n\nfrom')[2].partition("\n\n")[2]
    made = {"ParallelismConfig": dict, "TrainingConfig": dict}
    exec(body.partition("activation_checkpoint")[0], made, names)
    return names


def test_torchtitan_gets_each_stage_by_its_modules() -> None:
    text, lacks = written(STAGES, "torchtitan")
    found = torchtitans(text)
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 2,
        "module_fqns_per_model_part": [
            ["tok_embeddings", *(f"layers.{n}" for n in range(5))],
            [*(f"layers.{n}" for n in range(5, 8)), "norm", "lm_head"],
        ],
    }
    assert found["training"] == {"local_batch_size": 6, "global_batch_size": 12, "seq_len": 64}
    assert not lacks


def test_megatron_gets_a_layout_and_turns_of_it() -> None:
    text, _ = written(STAGES, "megatron")
    arguments = [line for line in text.splitlines() if not line.startswith("#")]
    assert "--pipeline-model-parallel-layout Et*5|t*3L" in arguments
    assert "--micro-batch-size 2" in arguments
    assert "--use-distributed-optimizer" in arguments
    text, _ = written(TURNS, "megatron")
    assert "--pipeline-model-parallel-size 2" in text
    assert "--pipeline-model-parallel-layout Et*2|t*2|t*2|t*2L" in text


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    text, lacks = written(REPLICAS, "accelerate", "fp16")
    assert "unlike shares (10, 6 samples a step); here every data rank takes 8" in lacks
    assert "save memory in unlike ways (none, full recompute)" in lacks
    assert "hetctl.data.Sampler" in lacks
    (tmp_path / "plan.yaml").write_text(text)
    found = load_config_from_file(str(tmp_path / "plan.yaml"))
    assert (found.num_processes, found.mixed_precision, found.use_cpu) == (2, "fp16", True)


def test_what_has_no_words_is_said_or_refused() -> None:
    _, lacks = written(BACKWARDS, "megatron", "fp64")
    assert "the schedule zero-bubble is not Megatron's" in lacks
    assert "start them in the order" in lacks
    with pytest.raises(ConfigError, match=r"unlike ranks \(data x tensor: 1 x 1, 2 x 1\)"):
        written(UNLIKE, "torchtitan")
    with pytest.raises(ConfigError, match="no pipeline stages"):
        written(STAGES, "accelerate")


def test_plan_writes_the_file_and_says_what_it_lacks(tmp_path: Path) -> None:
    words = ("plan", "--emulate", "h100:8,h200:8", "--set", "model.name=llama-8b", "--seq-len", "4096")
    words += ("--global-batch", "96", "--set", "parallelism.pipeline=1", "--for", "accelerate", "--json")
    done = hetctl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "num_processes: 16" in (tmp_path / "plan-accelerate.yaml").read_text()
    assert "unlike shares" in json.loads(done.stdout)["for"]["lacks"][0]
    assert hetctl(*words[:-2], "nemo", cwd=tmp_path).returncode == 2
