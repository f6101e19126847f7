"""The exceptions of tinyllm: each message is one line for the user that says what is wrong and what to do."""

from __future__ import annotations


class TinyLLMError(Exception):
    """Base of every error that a user can cause or mend; shown as one line, never as a traceback."""


class ModelFileError(TinyLLMError):
    """A GGUF file that is broken, cut off or hostile. The message names the file and the field."""


class UnsupportedModelError(TinyLLMError):
    """A sound file that asks for an architecture, tensor or format which tinyllm does not know."""


class ModelNotFoundError(TinyLLMError):
    """A model name or path that leads nowhere."""


class DownloadError(TinyLLMError):
    """A model could not be fetched, or what arrived was not what was promised."""


class TokenizerError(TinyLLMError):
    """The vocabulary of a file cannot be used."""


class ChatTemplateError(TinyLLMError):
    """A chat template failed or refused the messages."""


class ContextFullError(TinyLLMError):
    """The tokens do not fit into the context. The message holds both numbers."""


class InvalidParameterError(TinyLLMError):
    """A parameter's value is outside what it can be."""


class SamplingError(TinyLLMError):
    """No token can be chosen: the logits are broken, or a constraint leaves nothing."""


class KernelError(TinyLLMError):
    """Kernels cannot be compiled or loaded on this machine."""
