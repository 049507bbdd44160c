# Two parts of one GPU stand for two GPUs of one host, by CUDA's MPS: bash tests/gpu/parts_check.sh PERCENT FOLDER
# Layers are measured while a neighbour measures the same, as ranks are each other's neighbours in training. With 50 per
# cent they share a power limit, and one that waits makes the other faster; with 25 nothing is shared but memory's speed.
# ONLY names some of the cases. Native sums between the parts cannot be had (NCCL wants a GPU for
# each rank). Seven minutes of one GPU.
set -e
percent=$1 folder=$2 profile=$2/profile.yaml predictions=$2/predictions.json beside=$2/neighbour.yaml
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control' EXIT
echo "set_default_active_thread_percentage $percent" | nvidia-cuda-mps-control
measure() { python3 -m hetctl bench ops --model "$1" --seq-len 4096 --samples "$2" -o "$3"; }
mkdir -p "$folder"
for model in "llama-1b-untied 1,2,4" "llama-1b 1"; do
    measure $model "$beside" >/dev/null 2>&1 &
    measure $model "$profile"
    wait $!
done
python3 -m hetctl bench bridge --emulate h200:1,mi325x:1 -o "$profile"
python3 tests/gpu/predict_check.py predict --profile "$profile" --output "$predictions"
python3 tests/gpu/predict_check.py run --gpus 2 --profile "$profile" --predictions "$predictions" \
    --only "$ONLY" --skip @ --skip h200:2 --skip 8b --skip host
