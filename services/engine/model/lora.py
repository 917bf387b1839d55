"""Everything about LoRA adapters that other parts of Temper use."""

from __future__ import annotations

from services.engine.model.lora_binding import AdapterBinder, BoundAdapter, BoundTarget, bind_adapter
from services.engine.model.lora_params import LoraParams
from services.engine.model.lora_slots import LoraSlots
from services.engine.model.lora_targets import TARGET_MODULES

__all__ = ["TARGET_MODULES", "AdapterBinder", "BoundAdapter", "BoundTarget", "LoraParams", "LoraSlots", "bind_adapter"]
