"""Text data: sources of text, tokenizers, resumable batches over them, and entropy baselines.

Importing this package imports numpy only; ``grain`` and ``tokenizers`` are imported when they are needed.

>>> from jaxpar.data import eval_batches, load_text
>>> text = load_text("synthetic")
>>> evaluation = eval_batches(text.heldout, batch=4, seq=32, max_batches=2)
>>> [(b["tokens"].shape, b["targets"].shape) for b in evaluation]
[((4, 32), (4, 32)), ((4, 32), (4, 32))]
"""

from jaxpar.data.blend import Blend, BlendOrder
from jaxpar.data.chat_template import ChatTemplate, load_chat_template
from jaxpar.data.conversations import ConversationData, load_conversations
from jaxpar.data.documents import ReadOptions
from jaxpar.data.entropy import bigram_entropy, unigram_entropy
from jaxpar.data.generated_images import Ellipses, Gratings
from jaxpar.data.loader import Batches, batches, eval_batches
from jaxpar.data.packing import DocumentRows
from jaxpar.data.sources import Text, load_text
from jaxpar.data.token_file import TokenFile
from jaxpar.data.tokenize import write_tokens
from jaxpar.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from jaxpar.data.windows import Batch, EpochPlan, Windows

__all__ = [
    "Batch",
    "Batches",
    "Blend",
    "BlendOrder",
    "ChatTemplate",
    "ConversationData",
    "DocumentRows",
    "Ellipses",
    "EpochPlan",
    "Gratings",
    "ReadOptions",
    "Text",
    "TokenFile",
    "Tokenizer",
    "TokenizerConfig",
    "Windows",
    "batches",
    "bigram_entropy",
    "eval_batches",
    "load_chat_template",
    "load_conversations",
    "load_text",
    "load_tokenizer",
    "unigram_entropy",
    "write_tokens",
]
