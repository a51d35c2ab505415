//! What the daemon reads from its socket and from the kubelet's checkpoint, and what a client reads
//! from the daemon. A question that was read is read back the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use node_wire::document::decode_answer;
use node_wire::{PodUnits, Question};
use pools::checkpoint::Owners;

fuzz_target!(|data: &[u8]| {
    if let Ok(question) = Question::decode(data) {
        assert_eq!(Question::decode(&question.encode()), Ok(question));
    }
    let _ = decode_answer::<PodUnits>(data);
    let _ = Owners::parse(data);
});
