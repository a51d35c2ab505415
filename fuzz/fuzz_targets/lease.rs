//! A lease's record: what is read, written and read again, is the same.
#![no_main]

use ipam::lease::Lease;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(lease) = Lease::decode(bytes) else {
        return;
    };
    let again = Lease::decode(&lease.encode());
    assert_eq!(again.ok().as_ref(), Some(&lease));
});
