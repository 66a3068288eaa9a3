//! Values that several examples of the document share.

pub const ACCESS_TOKEN: &str = "eyJhbGciOiJFUzI1NiIsImtpZCI6InMxIiwidHlwIjoiYXQrand0In0.…";
pub const REFRESH_TOKEN: &str = "lkr_AAAAAQGahF…";
pub const USER_ID: &str = "019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88";
pub const SESSION_ID: &str = "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00";
