//! The three kinds of pool configuration: accepted, or refused with what is wrong.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pools::config::parse;

fuzz_target!(|text: &str| {
    match parse(text) {
        Ok(config) => {
            let mut names: Vec<&str> = config
                .pools
                .iter()
                .map(|pool| pool.resource.as_str())
                .collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "a resource has two pools");
        }
        Err(problems) => {
            assert!(problems.iter().all(|problem| !problem.is_empty()));
            assert!(problems.iter().next().is_some(), "refused without a reason");
        }
    }
});
