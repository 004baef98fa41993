//! Samples as engines write them, and as they do not.

use super::read;
use crate::decide::prerequisite::PrefixCaching;
use crate::fleet::status::Reported;
use crate::units::{BlockSize, Blocks, Ratio};
use proptest::prelude::*;

fn reported(waiting: u32, running: u32, usage: f64) -> Reported {
    Reported {
        waiting: Some(waiting),
        running: Some(running),
        kv_usage: Ratio::new(usage),
        kv_blocks: None,
        block_size: None,
        prefix_caching: PrefixCaching::Unknown,
    }
}

const VLLM: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.4137
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="27929",sliding_window="None"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001"} 0.0
process_virtual_memory_bytes 1.2e+10
"#;

#[test]
fn vllm_reports_load_usage_and_capacity() {
    assert_eq!(
        read(VLLM),
        Reported {
            kv_blocks: Some(Blocks(27929)),
            block_size: BlockSize::new(16),
            ..reported(2, 3, 0.4137)
        }
    );
}

#[test]
fn an_older_vllm_calls_its_usage_otherwise() {
    let text =
        "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:gpu_cache_usage_perc 0.5\n";
    assert_eq!(read(text), reported(0, 1, 0.5));
}

#[test]
fn sglang_reports_its_pages_in_either_form() {
    let load = "sglang:num_running_reqs{model_name=\"m\"} 162.0\nsglang:num_queue_reqs 2\nsglang:token_usage 0.28\n";
    let expected = Reported {
        kv_blocks: Some(Blocks(1000)),
        block_size: BlockSize::new(64),
        ..reported(2, 162, 0.28)
    };
    let labels = "sglang:cache_config_info{page_size=\"64\",num_pages=\"1000\"} 1\n";
    assert_eq!(read(&format!("{load}{labels}")), expected);
    let gauges = "sglang:max_total_num_tokens 64010\nsglang:page_size 64\n";
    assert_eq!(read(&format!("{load}{gauges}")), expected);
}

#[test]
fn several_ranks_behind_one_endpoint_are_one_report() {
    let text = r#"vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.4
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1
"#;
    let found = read(text);
    assert_eq!(found.running, Some(7));
    assert_eq!(found.kv_blocks, Some(Blocks(200)));
    assert!((found.kv_usage.unwrap().get() - 0.3).abs() < 1e-9);
}

#[test]
fn tensor_parallel_ranks_that_say_the_same_count_once() {
    let text = "sglang:num_running_reqs{tp_rank=\"0\",pp_rank=\"0\"} 5\nsglang:num_running_reqs{tp_rank=\"1\",pp_rank=\"0\"} 5\n";
    assert_eq!(read(text).running, Some(5));
}

#[test]
fn what_makes_no_sense_is_not_reported() {
    let text = r#"vllm:num_requests_running NaN
vllm:num_requests_waiting -3
vllm:kv_cache_usage_perc +Inf
vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1
"#;
    assert_eq!(read(text), Reported::default());
}

#[test]
fn a_usage_a_little_above_one_is_one() {
    assert_eq!(
        read("vllm:kv_cache_usage_perc 1.0000001").kv_usage,
        Some(Ratio::ONE)
    );
}

#[test]
fn names_that_only_begin_alike_are_other_samples() {
    let text = "vllm:num_requests_waiting_by_reason 9\nvllm:num_requests_running_total{} 9\n";
    assert_eq!(read(text), Reported::default());
}

#[test]
fn braces_and_quotes_inside_labels_are_text() {
    let text = r#"vllm:num_requests_running{model_name="a}\"{b=\"",engine="0"} 4 1700000000000"#;
    assert_eq!(read(text).running, Some(4));
    assert_eq!(
        read("vllm:num_requests_running{model_name=\"a").running,
        None
    );
}

proptest! {
    #[test]
    fn any_text_is_read(text in "\\PC{0,200}") {
        prop_assert_eq!(read(&text), Reported::default());
    }

    #[test]
    fn any_rest_of_a_line_is_read(rest in "[{}\"\\\\=, 0-9a-zé.\n-]{0,60}") {
        for (name, _) in super::SAMPLES {
            let found = read(&format!("{name}{rest}"));
            if let Some(usage) = found.kv_usage {
                prop_assert!(usage.get() <= 1.0);
            }
        }
    }
}

#[test]
fn vllm_says_whether_it_keeps_prefixes() {
    let said = |value: &str| {
        let line = format!("vllm:cache_config_info{{enable_prefix_caching=\"{value}\"}} 1.0\n");
        read(&line).prefix_caching
    };
    assert_eq!(said("True"), PrefixCaching::On);
    assert_eq!(said("False"), PrefixCaching::Off);
    assert_eq!(said("None"), PrefixCaching::Unknown);
    assert_eq!(read(VLLM).prefix_caching, PrefixCaching::Unknown);
}
