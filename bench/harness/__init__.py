"""Real vLLM servers in prefill/decode pairs: started, driven, compared and always stopped.

``tiny_model`` makes the model, ``servers`` starts and ends processes, ``pair`` joins prefill and
decode servers, ``client`` talks to them, ``workload`` makes requests and ``equality`` compares
answers token for token.
"""
