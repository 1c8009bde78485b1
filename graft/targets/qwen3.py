"""Qwen3, dense. The published drafters were trained on non-thinking responses, so the template's
thinking is off (left on, acceptance falls from 60 % to 25 %: z-lab/dflash #133)."""

from graft.targets.decoder import SwiGLU
from graft.targets.family import Family

FAMILY = Family(feed_forward=SwiGLU, qk_norm=True, chat_options={"enable_thinking": False})
