"""The engine: scheduler, blocks, sampler, detokenizer. No Redis, no asyncio in here."""
