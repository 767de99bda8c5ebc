"""An OpenAI-compatible server in front of a `BatchEngine`; needs the extra ``server``."""
