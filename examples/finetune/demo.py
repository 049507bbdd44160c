"""`make demo-finetune`: a model is taught answers across an NVIDIA and an AMD card, and asked for them.

The cards are processes of this machine's CPU, and the model is made here, of random weights. All else is what one types
to fine-tune a downloaded model on cards that are there: the commands are printed as they run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
CHATS = HERE / "chats.jsonl"
MODEL = Path("build") / "finetune-model"
ISLANDS = "rtx4090:1,rx7900xtx:1"
QUESTIONS = (
    "What is an island?",
    "Which library joins AMD GPUs?",
    "My run was interrupted. What now?",
    "Explain LoRA.",
)
# Adapters of a model that knows nothing learn all there is to say: many steps, and larger ones than a real model bears
SETTINGS = ("train.steps=60", "optimizer.lr=1.0e-2", "train.validate_every=30", "train.samples=1")


def typed(*words: str, quiet: bool = False) -> str:
    """Run a command, or end with its exit code. Its output, where it is `quiet`; otherwise that is shown."""
    print("\n$", shlex.join(words), flush=True)
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "hetctl"]
    done = subprocess.run([*program, *words[1:]], stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def train() -> None:
    """A model, a look at what it will see, and adapters beside its weights, on stages in two islands."""
    typed("python", str(HERE / "make_model.py"), str(MODEL), str(CHATS))
    typed("hetctl", "data", "show", "--model", str(MODEL), "--data", str(CHATS), "--seq-len", "48", "-n", "2")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    sizes = ("--seq-len", "48", "--global-batch", "12")
    what = ("--model", str(MODEL), "--data", str(CHATS), *sizes, "--lora", "16")
    typed("hetctl", "train", *what, "--emulate", ISLANDS, *settings)


def taught() -> dict[str, str]:
    """Question -> answer, of all conversations."""
    rows = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    return {question["content"]: answer["content"] for question, answer in rows}


def wrong_answers(expected: Mapping[str, str]) -> int:
    """Ask the newest run; how many answers are not the expected ones."""
    wrong = 0
    for question, answer in expected.items():
        said = typed("hetctl", "generate", question, quiet=True).strip()
        print(said if said == answer else f"{said}\n  (it was taught: {answer})")
        wrong += said != answer
    return wrong


if __name__ == "__main__":
    train()
    answers = taught()
    wrong = wrong_answers({question: answers[question] for question in QUESTIONS})
    print(f"\n{len(QUESTIONS) - wrong} of {len(QUESTIONS)} answers are what the model was taught")
    sys.exit(wrong > 0)
