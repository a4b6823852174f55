"""Structured output through llguidance: schemas, patterns and grammars as masks over the vocabulary."""
