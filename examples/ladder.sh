# A ladder on a CPU: `bash examples/ladder.sh TEXTS`, with Gutenberg books in TEXTS/gutenberg and web
# text in TEXTS/web. About an hour on two idle cores; if it is killed, give the last command again.
set -e
make() {
    windlass ladder quickstart "$@" --create --dir studies/cpu eval.every=0.5 eval.sample_every=0 \
        data.max_tokens=0 "data.source=[\"$texts/gutenberg/*.txt\", \"$texts/web/c4-style.txt\"]"
}
texts=${1:?directory of texts}
make --sizes 100k --tokens 8,16,32
make --sizes 300k --tokens 4,8,16
make --sizes 1M --tokens 1,2,4
make --sizes 3M --tokens 0.3,0.6,1.2
windlass ladder studies/cpu --workers 2
windlass report studies/cpu
