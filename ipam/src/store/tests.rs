mod explore;
pub(crate) mod meeting;
pub(crate) mod simulated;

use super::*;

#[test]
fn a_clock_that_is_more_than_two_seconds_off_is_warned_of() {
    for (server, here, warning) in [
        (1000, 1000, None),
        (1000, 1002, None),
        (1002, 1000, None),
        (1000, 1003, Some("is 3 s ahead of the file server's")),
        (1003, 1000, Some("is 3 s behind the file server's")),
    ] {
        let text = skew(server, here);
        match warning {
            None => assert_eq!(text, None, "{server} {here}"),
            Some(part) => assert!(text.is_some_and(|text| text.contains(part)), "{part}"),
        }
    }
}

#[test]
fn the_file_servers_time_is_read_from_a_new_file() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open_path(place.path()).unwrap();
    let before = jiff::Timestamp::now().as_second();
    let server = server_time(&dir).unwrap();
    // The kernel stamps files by a clock that ticks every few milliseconds.
    assert!((before - 1..=jiff::Timestamp::now().as_second()).contains(&server));
    assert!(dir.names().unwrap().is_empty());
}
