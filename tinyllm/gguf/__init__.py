"""What a GGUF file is made of: tensor types, the checked header, metadata. `tinyllm.gguf_file` opens files."""
