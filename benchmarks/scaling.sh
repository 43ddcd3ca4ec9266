#!/bin/bash
# The scaling studies of docs/evidence/scaling.md: a small BLOOM-shaped model on real SQuAD questions, on 1 and 2 ranks of one thread
# each over gloo. The last lines that it prints are the tables of the page.
#
#     bash benchmarks/scaling.sh SQUAD_TRAIN.json DIR [REPEATS]
#
# REPEATS is 3 by default. Killed, it continues. WINDLASS names the command if `windlass` is not on the path, STEPS the steps of a run
# (24). The machine must be otherwise idle.
set -eu
[ $# -ge 2 ] || { sed -n '5p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd) squad=$(realpath "$1") repeats=${3:-3} steps=${STEPS:-24}
mkdir -p "$2/bloom" && cd "$2"
echo '{"model_type": "bloom", "architectures": ["BloomForCausalLM"], "vocab_size": 4096, "hidden_size": 128, "n_layer": 4, "n_head": 4}' > bloom/config.json

windlass=(${WINDLASS:-windlass})
bloom=(data.source="squad:$squad" data.tokenizer=bpe data.tokenizer_vocab=4096 data.train_size=96 data.eval_size=16 data.dir=data
       model.context=256 train.threads=1 parallel.device=cpu model.name=bloom model.revision= model.from_scratch=true)
short=(train.steps="$steps" eval.every=0 eval.suites='["loss"]' checkpoint.every=0 checkpoint.best=loss)

study() {  # NAME, then the arguments of `windlass scale`
    local name=$1
    shift
    "${windlass[@]}" scale "$@" --worlds 1,2 --dir "studies/$name" --repeats "$repeats" >&2
    "${windlass[@]}" report "studies/$name" > "studies/$name.txt"
}

# one micro-batch for all setups of a study: items are padded to the longest in it, so a larger one computes more
study strong bloom-560m-squad --mode strong "${bloom[@]}" "${short[@]}" train.global_batch=8 train.micro_batch=4
study fixed-data bloom-squad-scaling "${bloom[@]}" train.steps="3 epochs"
study weak bloom-560m-squad --mode weak "${bloom[@]}" "${short[@]}" train.global_batch=4 train.micro_batch=4
exec "${PYTHON:-python3}" "$here/scaling_tables.py" studies
