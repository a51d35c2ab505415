//! A record of leases: what is read, written and read again, is the same.
#![no_main]

use ipam::lease::{Record, RecordFormat};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(record) = Record::decode(bytes) else {
        return;
    };
    let again = Record::decode(&record.encode(RecordFormat::PerOrder)).unwrap();
    assert_eq!(again.leases().len(), record.leases().len());
    // A record of one lease does not say which part of its order that is.
    let order = again.encode(RecordFormat::PerOrder);
    assert_eq!(Record::decode(&order).as_ref(), Ok(&again));
});
