use super::*;
use crate::names::ModelName;
use crate::units::BlockSize;

fn encoder() -> Encoder {
    let profile = Profile::builtin().unwrap();
    Encoder::new(Profiles::new(vec![profile]).unwrap(), 1 << 20)
}

#[test]
fn a_chat_is_counted_with_the_model_s_template() {
    let encoder = encoder();
    let body = br#"{"model":"sidestep-small","messages":[{"role":"user","content":"Hello"}]}"#;
    let request = parse(Api::ChatCompletions, body).unwrap();
    let ids = encoder.token_ids(&request).unwrap().remove(0);
    let model = (encoder
        .profiles()
        .resolve(&ModelName::from("sidestep-small")))
    .unwrap();
    assert_eq!(
        model.profile.tokenizer().unwrap().decode(&ids).unwrap(),
        "<|bos|><|turn|>user\nHello<|end|>\n<|turn|>assistant\n"
    );
    let prompt = encoder.encode(&request, &[BlockSize::new(4).unwrap()]);
    assert_eq!(prompt.tokens, Tokens(ids.len() as u64));
    assert_eq!(prompt.chains[0].keys.len(), ids.len() / 4);
}
