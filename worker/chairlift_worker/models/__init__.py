"""Models: loading, the lean decoder, the transformers fallback, the tokenizer and templates."""
