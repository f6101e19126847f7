"""The parts of tokenizers and chat templates. `tinyllm.tokenizer` and `tinyllm.chat_format` put them together."""
