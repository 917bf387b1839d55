"""Everything about LoRA adapters that other parts of Temper use."""

from __future__ import annotations

from services.engine.models.lora.binding import AdapterBinder, BoundAdapter, BoundTarget, bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.lora.trainable import LoraParams

__all__ = ["TARGET_MODULES", "AdapterBinder", "BoundAdapter", "BoundTarget", "LoraParams", "LoraSlots", "bind_adapter"]
