"""Fields of a ``config.json`` that are not read: refused where ``transformers`` would build another model of them.

===========================================  ==========================================================
a field that is not read                     what becomes of it
===========================================  ==========================================================
has the value that the built model has       nothing is lost
acts in training, generation or loading      listed
``transformers`` does not know               listed
any other                                    refused: the model would be another
===========================================  ==========================================================
"""

import re
from collections.abc import Mapping
from typing import Any

from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names

_HARMLESS = re.compile(
    r"""(_name_or_path|name_or_path|architectures|auto_map|transformers_version|torch_dtype|dtype|use_cache|torchscript
    |initializer_\w+|init_\w+|\w*dropout\w*|\w*_drop|layerdrop|\w*_pdrop|resid_pdrop|gradient_checkpointing
    |output_(attentions|hidden_states)|return_dict|task_specific_params|finetuning_task|\w+_token_id|\w+_token
    |id2label|label2id|num_labels|_num_labels|tokenizer_class|attn_implementation|_attn_implementation\w*
    |summary_\w+|prefix|problem_type|classifier_\w+|tie_weights_|pretraining_tp|use_bfloat16|directionality|pooler_\w+
    |max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p
    |typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids
    |num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|suppress_tokens
    |begin_suppress_tokens|forced_\w+|decoder_start_token_id|reorder_and_upcast_attn|chunk_size_feed_forward
    |vocab_size|language|gradient_\w+|dataset\w*|metadata\w*|model_type|is_composition|out_(features|indices)|stage_names
    |unsloth_\w+|special_tokens_map\w*|mask_\w+|encoder_stride|cross_attention_hidden_size)""",
    re.VERBOSE,
)
"""Fields that change nothing of a forward pass in evaluation mode."""
_MISSING = object()


def account_for_fields(
    config: Mapping[str, Any],
    read: frozenset[str],
    built: Any,  # noqa: ANN401 - a configuration of transformers
    context: LoaderContext,
    pointer: str,
) -> None:
    """List the fields that are not read, and refuse those by which the model would be another."""
    changing = []
    for name in sorted(set(config) - read):
        value, own = config[name], getattr(built, name, _MISSING)
        if _is_same(value, own):
            continue
        if own is _MISSING or _HARMLESS.fullmatch(name) or value in (None, [], {}):
            context.unused(f"config.json: {names([name])}")
        else:
            changing.append(name)
    if changing:
        few = [(name, _shown(config[name]), _shown(getattr(built, name))) for name in changing[:3]]
        shown = ", ".join(f"{names([name])} ({value}, and {own} here)" for name, value, own in few)
        raise Refusal(
            f"config.json: {shown} would make it another model, and is not read; load the model yourself, and give it "
            "by `source: factory` or to `kronoscope.local.measure`",
            pointer=pointer,
            code="unread_field",
        )


def _shown(value: object) -> str:
    return repr(value)[:60]


def _is_same(value: Any, own: Any) -> bool:  # noqa: ANN401 - decoded from JSON, and an attribute of transformers
    if isinstance(own, tuple):
        own = list(own)
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (value, own))
    return (numbers or type(value) is type(own)) and bool(value == own)
