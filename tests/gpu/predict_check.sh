# Measures this machine's layers and bridges, predicts from that alone, then runs: bash tests/gpu/predict_check.sh GPUS FOLDER
# PARTS="measure predict run" says which; MODELS which. One GPU (SPEEDS=1.0) runs what one can. A quarter of an hour of two GPUs.
set -e
gpus=$1 folder=$2 profile=$2/profile.yaml predictions=$2/predictions.json
for part in ${PARTS:-measure predict run}; do
    case $part in
    measure)
        for model in llama-1b-untied llama-8b; do
            for speed in ${SPEEDS:-1.0 0.6}; do
                python3 -m hetctl bench ops --model $model --seq-len 4096 --samples 1,2,4 --at-speed $speed -o "$profile"
            done
        done
        python3 -m hetctl bench ops --model llama-1b --seq-len 4096 --samples 1,2 -o "$profile"
        if [ "$gpus" -gt 1 ]; then
            python3 -m hetctl bench ops --model llama-1b-untied --seq-len 4096 --samples 1,2 --tensor 2 -o "$profile"
            python3 -m hetctl bench bridge --emulate h200:1,mi325x:1 -o "$profile"
        fi
        ;;
    predict) python3 tests/gpu/predict_check.py predict --profile "$profile" --output "$predictions" ;;
    run)
        for model in ${MODELS:-llama-1b-untied llama-8b}; do
            python3 tests/gpu/predict_check.py run --gpus "$gpus" --profile "$profile" --predictions "$predictions" --only $model
        done
        ;;
    esac
done
