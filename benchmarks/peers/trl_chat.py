"""LoRA adapters on conversations with TRL's SFTTrainer and its packing.

python benchmarks/peers/trl_chat.py MODEL_DIR TALK.jsonl CONTEXT BATCH STEPS fp32|bf16

Rank, targets, precision, learning rate and the labels (answers alone) are as in Windlass's recipe,
and no activations are recomputed. TRL counts the unpadded tokens.
"""

import itertools
import json
import sys

import torch
from datasets import load_dataset
from hf_trainer import StepSeconds
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    folder, talk = sys.argv[1:3]
    context, batch, steps = map(int, sys.argv[3:6])
    bf16 = sys.argv[6] == "bf16"
    arguments = SFTConfig(
        output_dir="trl",
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        max_length=context,
        packing=True,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=bf16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    timer = StepSeconds()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16 if bf16 else torch.float32
        ),
        args=arguments,
        train_dataset=load_dataset("json", data_files=talk, split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[timer],
    )
    trainer.train()
    total = [line["num_tokens"] for line in trainer.state.log_history if "num_tokens" in line]
    tokens = [total[0], *(b - a for a, b in itertools.pairwise(total))]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps({"step_s": timer.seconds, "tokens": tokens, "losses": losses}))


if __name__ == "__main__":
    main()
