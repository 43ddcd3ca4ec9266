#!/bin/bash
# The scaling studies of docs/evidence/scaling.md: a small BLOOM-shaped model and a small GPT on real SQuAD questions, 1, 2 and 4 ranks of
# one thread each over gloo.
#
#     bash benchmarks/scaling.sh SQUAD_TRAIN.json DIR [REPEATS]
#
# REPEATS is 2 where it is left out. Killed, it continues. WINDLASS names the command where `windlass` is not on the path, STEPS the
# steps of a run (24). Four ranks on fewer than four cores take turns; the reports say so. The machine must be otherwise idle.
set -eu
[ $# -ge 2 ] || { sed -n '5p' "$0"; exit 2; }
squad=$(realpath "$1") repeats=${3:-2} steps=${STEPS:-24}
mkdir -p "$2/bloom" && cd "$2"
echo '{"model_type": "bloom", "architectures": ["BloomForCausalLM"], "vocab_size": 4096, "hidden_size": 128, "n_layer": 4, "n_head": 4}' > bloom/config.json

windlass=(${WINDLASS:-windlass})
data=(data.source="squad:$squad" data.tokenizer=bpe data.tokenizer_vocab=4096 data.train_size=96 data.eval_size=16 data.dir=data
      model.context=256 train.threads=1 parallel.device=cpu)
bloom=("${data[@]}" model.name=bloom model.revision= model.from_scratch=true)
gpt=("${data[@]}" model.layers=2 model.heads=4 model.width=128 model.ff_width=512 model.vocab=4096)
short=(train.steps="$steps" eval.every=0 eval.suites='["loss"]' checkpoint.every=0 checkpoint.best=loss)

study() {  # NAME, then the arguments of `windlass scale`
    local name=$1 begun=$SECONDS
    shift
    "${windlass[@]}" scale "$@" --dir "studies/$name" --repeats "$repeats" || [ $? = 1 ]  # 1: a cell failed, which its report says
    echo "$name: $((SECONDS - begun)) s"
    "${windlass[@]}" report "studies/$name" > "studies/$name.txt"
}

# one micro-batch for all setups of a study: items are padded to the longest in it, so a larger one computes more
study strong bloom-560m-squad --mode strong --worlds 1,2,4 --project 8,16 "${bloom[@]}" "${short[@]}" train.global_batch=8 train.micro_batch=2
study fixed-data bloom-squad-scaling --worlds 1,2,4 "${bloom[@]}" train.steps="3 epochs"
study weak-batch bloom-560m-squad --mode weak --worlds 1,2,4 --project 8,16 "${bloom[@]}" "${short[@]}" train.global_batch=4 train.micro_batch=4
study weak-model gpt-squad-weak --worlds 1,2,4 "${gpt[@]}" "${short[@]}" train.global_batch=8 train.micro_batch=2
study strategies bloom-squad-strategies --worlds 2 --no-probe "${bloom[@]}" "${short[@]}" train.steps=$((steps / 2)) train.global_batch=4 train.micro_batch=2
