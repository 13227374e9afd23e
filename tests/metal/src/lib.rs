//! Tests of Metal hosts on the software device are in `tests`. This library is empty.
