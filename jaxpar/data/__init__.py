"""Text data: sources of text, tokenizers, resumable batches over them, and entropy baselines.

Its names load on first use; ``grain`` and ``tokenizers`` are imported when they are needed.

>>> from jaxpar.data import eval_batches, load_text
>>> text = load_text("synthetic")
>>> evaluation = eval_batches(text.heldout, batch=4, seq=32, max_batches=2)
>>> [(b["tokens"].shape, b["targets"].shape) for b in evaluation]
[((4, 32), (4, 32)), ((4, 32), (4, 32))]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.data.blend import Blend as Blend
    from jaxpar.data.blend import BlendOrder as BlendOrder
    from jaxpar.data.chat_template import ChatTemplate as ChatTemplate
    from jaxpar.data.chat_template import load_chat_template as load_chat_template
    from jaxpar.data.conversations import ConversationData as ConversationData
    from jaxpar.data.conversations import ConversationPrompt as ConversationPrompt
    from jaxpar.data.conversations import conversation_prompt as conversation_prompt
    from jaxpar.data.conversations import load_conversations as load_conversations
    from jaxpar.data.documents import ReadOptions as ReadOptions
    from jaxpar.data.entropy import bigram_entropy as bigram_entropy
    from jaxpar.data.entropy import unigram_entropy as unigram_entropy
    from jaxpar.data.generated_images import Ellipses as Ellipses
    from jaxpar.data.generated_images import Gratings as Gratings
    from jaxpar.data.loader import Batches as Batches
    from jaxpar.data.loader import batches as batches
    from jaxpar.data.loader import eval_batches as eval_batches
    from jaxpar.data.packing import DocumentRows as DocumentRows
    from jaxpar.data.sources import Text as Text
    from jaxpar.data.sources import load_text as load_text
    from jaxpar.data.token_file import TokenFile as TokenFile
    from jaxpar.data.tokenize import write_tokens as write_tokens
    from jaxpar.data.tokenizer import Tokenizer as Tokenizer
    from jaxpar.data.tokenizer import TokenizerConfig as TokenizerConfig
    from jaxpar.data.tokenizer import load_tokenizer as load_tokenizer
    from jaxpar.data.windows import Batch as Batch
    from jaxpar.data.windows import EpochPlan as EpochPlan
    from jaxpar.data.windows import Windows as Windows
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
