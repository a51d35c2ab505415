//! A record of leases: what is read, written and read again, is the same.
#![no_main]

use ipam::lease::Record;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(record) = Record::decode(bytes) else {
        return;
    };
    assert_eq!(Record::decode(&record.encode()).as_ref(), Ok(&record));
});
