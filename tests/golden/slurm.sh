#!/bin/bash
#SBATCH --job-name=job
#SBATCH --partition=low
#SBATCH --account=nlp
#SBATCH --gres=gpu:a100:1
#SBATCH --time=240:00
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --array=0-3
#SBATCH --output=/jobs/run/slurm-%A_%a.log
#SBATCH '--constraint=a100|h100'
#SBATCH --mail-type=END
# Started again after a preemption or the loss of a node, the job goes on with its log.
#SBATCH --requeue
#SBATCH --open-mode=append
# So many seconds before the end the workers are told to save and leave.
#SBATCH --signal=USR2@30

# srun hands signals on to the workers; a plain child of this script would not get them
srun --kill-on-bad-exit=0 --cpus-per-task=8 /venv/bin/python -m jobrunner.cli run '/jobs/a b.toml'
code=$?
# 75: it had to leave early; 140, 143: it was told to before it could listen
case "$code" in
    75 | 140 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
