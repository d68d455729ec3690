"""Everstream next to four others on one machine, in one run: who makes more tokens a second.

``python -m benchmarks.peers.environments FOLDER`` installs llama.cpp, ik_llama.cpp, OpenVINO GenAI
and vLLM, each in an environment of its own; ``python -m benchmarks.peers --environments FOLDER``
measures. What one of them cannot load or run is said in its own words.
"""
