"""LoRA: files of PEFT, their binding to the model, adapter slots on the device, trainable parameters."""
