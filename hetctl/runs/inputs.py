"""What a run is made of besides its plan: the data and the weights to start from, said and checked before it starts."""

from __future__ import annotations

from hetctl.comm.contract.errors import ConfigError
from hetctl.console import Sink
from hetctl.trainer.data.megatron import is_megatron
from hetctl.trainer.data.sources import source_files
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.weights import find_weights, model_folder, refuse_unread_weights
from hetctl.trainer.recipe import TOKENIZER, Recipe


def say_data(recipe: Recipe, sink: Sink) -> None:
    """What is trained on, and through which tokenizer, which nobody may have named."""
    data, folder = recipe.data, model_folder(recipe.model.name)
    lacking = data.tokenizer == "bytes" and folder is not None and not (folder / TOKENIZER).is_file()
    why = f" ({folder} has no {TOKENIZER})" if lacking else ""
    made = "tokens already" if is_megatron(data.source) else f"tokenizer {data.tokenizer}{why}"
    sink.say(f"data: {data.source}, {made}")


def check_data(recipe: Recipe) -> None:
    """Raise ConfigError unless the data is there, can be tokenised, and fits the model."""
    source_files(recipe.data)
    tokens = open_tokens(recipe.data)
    vocabulary = recipe.shape().vocab
    if tokens.vocabulary > vocabulary:
        raise ConfigError(
            f"the data's tokens go up to {tokens.vocabulary - 1}, the model's vocabulary only to {vocabulary - 1}",
            hint="take the model's own tokenizer, or a model with a larger vocabulary",
        )
    for side in (tokens.train, tokens.validation):
        if len(side) <= recipe.model.seq_len:
            raise ConfigError(
                f"'{recipe.data.source}' gives {len(tokens.train)} tokens to train and {len(tokens.validation)} to "
                f"validate on, too few for samples of {recipe.model.seq_len}",
                hint="use more text, a larger data.validation_share, or a smaller model.seq_len",
            )


def check_start(recipe: Recipe, shape: ModelShape, sink: Sink) -> None:
    """Say what weights a model folder gives to start from. Raises ConfigError where they cannot be used."""
    refuse_unread_weights(recipe.model.name)
    if weights := find_weights(recipe.model.name):
        from hetctl.trainer.model.huggingface import check_weights  # torch, which not every start needs

        check_weights(weights, shape)
        sink.say(f"fine-tuning the weights in {weights}")
    elif folder := model_folder(recipe.model.name):
        sink.warn(f"no weights in {folder}: they start random")
