//! Names of span attributes and events: the schema of our traces.
//!
//! Lives here: constants, and the table that documents them.
//! Never here: values.
//! Invariant: every attribute that a span carries is in [`TABLE`]; a test pins both.

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident = $key:literal : $meaning:literal;)+) => {
        $(#[doc = $meaning] pub const $name: &str = $key;)+

        /// Every attribute: key and meaning, in the order of the documentation.
        pub const TABLE: &[(&str, &str)] = &[$(($key, $meaning),)+];
    };
}

fields! {
    OPERATION = "gen_ai.operation.name": "`chat` or `text_completion`";
    MODEL = "gen_ai.request.model": "model as the client named it, when it is a configured one";
    MAX_TOKENS = "gen_ai.request.max_tokens": "most tokens the client asked for";
    STREAM = "gen_ai.request.stream": "whether the client asked for a stream";
    INPUT_TOKENS = "gen_ai.usage.input_tokens": "prompt tokens as the engine reported them";
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens": "generated tokens as the engine reported them";
    CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens": "cached prompt tokens as the engine reported them";
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk": "time from the whole request to the first response bytes, in seconds";
    SERVER_ADDRESS = "server.address": "address of the pod that decodes";
    SERVER_PORT = "server.port": "port of the pod that decodes";
    STATUS = "http.response.status_code": "status of the answer";
    ERROR = "error.type": "word for the refusal or failure";
    DECISION_ID = "sidestep.decision.id": "id of the decision, also in `x-sidestep-decision`";
    ROUTE = "sidestep.route": "`local`, `remote`, or `refused`";
    BECAUSE = "sidestep.because": "why, in one word; for a refusal, the same as `error.type`";
    BYPASS = "sidestep.bypass": "whether remote prefill was skipped by policy";
    POLICY = "sidestep.policy.name": "policy in force";
    GENERATION = "sidestep.policy.generation": "version of the policy in force";
    RULE = "sidestep.policy.rule": "index of the rule that applied";
    DECODE_POD = "sidestep.decode.pod": "name of the pod that decodes";
    DECODE_ENDPOINT = "sidestep.decode.endpoint": "endpoint of the pod that decodes";
    DECODE_KV_SOURCE = "sidestep.decode.kv_source": "state of its KV events";
    PREFILL_POD = "sidestep.prefill.pod": "name of the pod that prefills for it";
    PREFILL_ENDPOINT = "sidestep.prefill.endpoint": "endpoint of the pod that prefills for it";
    PREFILL_KV_SOURCE = "sidestep.prefill.kv_source": "state of its KV events";
    PROMPT_TOKENS = "sidestep.prompt_tokens": "length of the prompt, in tokens";
    COUNTED = "sidestep.prompt_tokens.counted": "`exact`, `estimated_from_bytes` or `no_prompt`";
    CACHED_TOKENS = "sidestep.cached_tokens": "prompt tokens that the best local pod holds";
    NET_NEW_TOKENS = "sidestep.net_new_tokens": "prompt tokens that it does not hold";
    LOCAL_POD = "sidestep.local.pod": "endpoint of the best pod to prefill and decode";
    LOCAL_COST = "sidestep.local.cost": "its cost, in blocks";
    LOCAL_DEVICE = "sidestep.local.cached_blocks.device": "leading blocks it holds on the device";
    LOCAL_HOST = "sidestep.local.cached_blocks.host": "leading blocks it holds beyond those, in host memory";
    LOCAL_DISK = "sidestep.local.cached_blocks.disk": "leading blocks it holds beyond those, on disk";
    LOCAL_KV_SOURCE = "sidestep.local.kv_source": "state of its KV events";
    LOCAL_PREFILL_TOKENS = "sidestep.local.load.prefill_tokens": "prefill tokens promised to it";
    LOCAL_DECODE_BLOCKS = "sidestep.local.load.decode_blocks": "KV blocks promised to it";
    REMOTE_PREFILL = "sidestep.remote.prefill": "endpoint of the best pod to prefill remotely";
    REMOTE_PREFILL_COST = "sidestep.remote.prefill.cost": "its cost, in blocks";
    REMOTE_PREFILL_CACHED = "sidestep.remote.prefill.cached_tokens": "prompt tokens it holds";
    REMOTE_PREFILL_DEVICE = "sidestep.remote.prefill.cached_blocks.device": "leading blocks it holds on the device";
    REMOTE_PREFILL_HOST = "sidestep.remote.prefill.cached_blocks.host": "leading blocks it holds beyond those, in host memory";
    REMOTE_PREFILL_DISK = "sidestep.remote.prefill.cached_blocks.disk": "leading blocks it holds beyond those, on disk";
    REMOTE_PREFILL_TOKENS = "sidestep.remote.prefill.load.prefill_tokens": "prefill tokens promised to it";
    REMOTE_DECODE = "sidestep.remote.decode": "endpoint of the best pod to decode after a remote prefill";
    REMOTE_DECODE_COST = "sidestep.remote.decode.cost": "its cost, in blocks";
    REMOTE_DECODE_BLOCKS = "sidestep.remote.decode.load.decode_blocks": "KV blocks promised to it";
    CHECKS = "sidestep.checks": "each comparison with its numbers, in order";
    NET_NEW_VALUE = "sidestep.check.net_new.value": "net-new tokens, as compared";
    NET_NEW_THRESHOLD = "sidestep.check.net_new.threshold": "`effectiveIslThreshold`";
    RATIO_VALUE = "sidestep.check.ratio.value": "net-new tokens / prompt tokens, as compared";
    RATIO_THRESHOLD = "sidestep.check.ratio.threshold": "`effectiveIslRatioThreshold`";
    PROMPT_VALUE = "sidestep.check.prompt.value": "prompt tokens, as compared";
    PROMPT_THRESHOLD = "sidestep.check.prompt.threshold": "`coldBypassBelow`";
    PREFILL_BUSY_VALUE = "sidestep.check.prefill_busy.value": "queued prefill tokens / capacity of the prefill pod, as compared";
    PREFILL_BUSY_THRESHOLD = "sidestep.check.prefill_busy.threshold": "`prefillBusyThreshold`";
    DECODE_BUSY_VALUE = "sidestep.check.decode_busy.value": "KV blocks in use / capacity of the decode pod, as compared";
    DECODE_BUSY_THRESHOLD = "sidestep.check.decode_busy.threshold": "`decodeBusyThreshold`";
    FLIP = "sidestep.flip": "the nearest change of one threshold that would have given the other answer";
    SHADOW_POLICY = "sidestep.shadow.policy": "policy in the shadow of the one in force";
    SHADOW_ROUTE = "sidestep.shadow.route": "`local`, `remote` or `refused`: what it would have done";
    SHADOW_BECAUSE = "sidestep.shadow.because": "why, in one word";
    SHADOW_BYPASS = "sidestep.shadow.bypass": "whether it would have skipped remote prefill";
    SHADOW_AGREES = "sidestep.shadow.agrees": "whether route and pods are the same as those taken";
    CANDIDATES = "sidestep.candidates": "how many pods were looked at";
    SESSION = "sidestep.session": "`none`, `new`, `kept` (the pod of the last turn) or `moved`";
    ENCODE_TROUBLE = "sidestep.encode.trouble": "why the prompt could not be tokenised exactly";
    END = "sidestep.end": "`completed`, `aborted`, or `refused`";
}

macro_rules! names {
    ($(#[$doc:meta])* $table:ident { $($name:ident = $key:literal : $meaning:literal;)+ }) => {
        $(#[doc = $meaning] pub const $name: &str = $key;)+

        $(#[$doc])*
        pub const $table: &[(&str, &str)] = &[$(($key, $meaning),)+];
    };
}

names! {
    /// Every span: name and meaning.
    SPANS {
        SPAN_PICK = "pick": "the request, from its whole body to the end of the answer; one that ends before its pick, from its headers (kind `SERVER`)";
        SPAN_PARSE = "parse": "the body is read (this and the following have kind `INTERNAL` and are below `pick`)";
        SPAN_ENCODE = "encode": "the prompt is rendered and tokenised";
        SPAN_OBSERVE = "observe": "pods, their caches and reports are looked at";
        SPAN_DECIDE = "decide": "the rules are applied";
        SPAN_BOOK = "book": "the load is promised to the chosen pods";
    }
}

names! {
    /// Every event of `pick`: name and meaning.
    EVENTS {
        EVENT_FIRST_BYTES = "first_bytes": "the first response bytes came: prefill is over";
        EVENT_END = "end": "the answer is over; carries `sidestep.end` and what the engine said it used (`gen_ai.usage.*`), cached tokens among it";
    }
}
