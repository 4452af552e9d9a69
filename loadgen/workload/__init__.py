"""Workloads: lengths, generated prompts, files of requests and traces."""

from loadgen.workload.base import RequestSpec, Tokenizer, Workload
from loadgen.workload.chats import Chats
from loadgen.workload.groups import PrefixGroups
from loadgen.workload.lengths import Lengths, parse_lengths
from loadgen.workload.prefix import SharedPrefix
from loadgen.workload.presets import PRESETS, Preset, preset
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.sharegpt import ShareGPT
from loadgen.workload.synthetic import Synthetic
from loadgen.workload.tokenizer import LocalTokenizer, RemoteTokenizer
from loadgen.workload.traces import MooncakeTrace, PromptFile

__all__ = [
    "PRESETS",
    "Chats",
    "Lengths",
    "LocalTokenizer",
    "MooncakeTrace",
    "PrefixGroups",
    "Preset",
    "PromptFile",
    "PromptWriter",
    "RemoteTokenizer",
    "RequestSpec",
    "ShareGPT",
    "SharedPrefix",
    "Synthetic",
    "Tokenizer",
    "Workload",
    "parse_lengths",
    "preset",
]
