### The texts of the hosted pages in English. Each message is plain text with variables. An App can replace messages.

## Every page

title-with-error = Error: { $title }
or = or
back-to-login = Back to login
back-to-account = Back to your account
save = Save
cancel = Cancel
request-id = Request ID: { $id }
language = Language
language-en = English
language-de = Deutsch
link-home = Go to { $app }
link-terms = Terms
link-privacy = Privacy
link-support = Help

## Fields

name-label = Name
email-label = Email address
new-email-label = New email address
password-label = Password
new-password-label = New password
current-password-label = Current password
code-label = Code
password-hint = At least { $minimum } characters. Several unusual words make a good password.
password-show = Show
password-hide = Hide
code-hint = Upper and lower case, spaces and hyphens do not matter.

## Log in

login-title = Log in
login-button = Log in
login-forgot = Forgot your password?
login-no-account = New here?
login-register = Create an account
login-notice-password-reset = Your new password is set. You can log in with it now.
login-notice-account-deleted = Your account is deleted.
login-notice-other-account = Log in with the account that you want to use.
login-notice-again = Please log in again, so that we know that it is you.
provider-continue = Continue with { $provider }

## Create an account

register-title = Create your account
register-button = Create account
register-have-account = Already have an account?
register-login = Log in

## Confirm the email address

confirm-notice-title = Check your email
confirm-notice-sent = We have sent an email to { $email }. Open the link in it, or enter its code here.
confirm-notice-account = If you already have an account, the email says how to log in.
confirm-title = Confirm your email address
confirm-lead = Enter the code from our email.
confirm-lead-link = One click, and your email address is confirmed.
confirm-lead-password = Please enter your password as well, so that we know that it is you.
confirm-lead-login = Please log in first. Then open the link in the email again.
confirm-button = Confirm
confirm-no-mail = No email? Please look into the spam folder.
confirm-try-again = Try again

## Reset the password

forgot-title = Forgot your password?
forgot-lead = Enter your email address. We send you a code for a new password.
forgot-button = Send code
forgot-notice-title = Check your email
forgot-notice-sent = If { $email } has an account, an email with a code is on its way. It can take a minute.
forgot-notice-button = Enter the code
forgot-notice-again = Use another email address
reset-title = Choose a new password
reset-lead = Enter the code from our email and your new password. You will be logged out on all devices.
reset-lead-link = You will be logged out on all devices.
reset-button = Set new password

## Account

account-title = Your account
account-profile = Profile
account-login = Login
account-more = Security
account-name = Name
account-email = Email address
account-email-none = Not set
account-email-verified = Confirmed
account-email-unverified = Not confirmed yet
account-email-resend = Send the email again
account-email-pending = Waiting for the confirmation of { $email }
account-password = Password
account-password-set = Set
account-password-none = Not set
account-identities = Linked accounts
account-sessions = Devices
account-sessions-value = Where you are logged in
account-activity = Activity
account-activity-value = What happened in your account
account-applications = Applications
account-applications-value = What can use your account
account-delete = Delete account
account-logout = Log out
account-notice-name = Your name is saved.
account-notice-email-sent = We have sent an email to { $email }. Open the link in it to confirm the address.
account-notice-email-confirmed = Your email address is confirmed.
account-notice-password = Your new password is set.
account-notice-linked = { $provider } is linked. You can log in with it from now on.
account-notice-unlinked = { $provider } is no longer linked.
account-notice-session-ended = The device is logged out.
account-notice-others-ended = All other devices are logged out.
account-notice-application-removed = The application no longer has access.
reauthenticate-login = Please log in again to continue.

password-title = Change your password
password-title-new = Set a password
password-lead-required = Your account has no password. Please set one now.
password-button = Save password

email-title = Change your email address
email-current = Your email address is { $email }.
email-lead = We send a link to the new address. It replaces the old one when you open the link.
email-button = Send link

delete-title = Delete your account
delete-lead = This deletes your account at { $app }, with everything in it. It cannot be undone.
delete-password = Enter your password to confirm.
delete-button = Delete account for good

identities-title = Linked accounts
identities-lead = You can log in with each of these.
identities-empty = No account is linked yet.
identities-add = Link another account
identities-since = Linked on { $date }
identities-link = Link { $provider }
identities-unlink = Unlink
identities-unlink-label = Unlink { $provider }

sessions-title = Devices
sessions-lead = You are logged in here. Do you not know a device? Log it out and change your password.
sessions-current = This device
sessions-used = Last used { $date }
sessions-end = Log out
sessions-end-label = Log out { $device }
sessions-end-others = Log out all other devices
device = { $browser } on { $system }
device-unknown = Unknown device

applications-title = Applications
applications-lead = These applications can use your account.
applications-empty = No application can use your account.
applications-since = Allowed on { $date }
applications-remove = Remove
applications-remove-label = Remove { $client }

activity-title = Activity
activity-lead = What happened in your account lately. The newest is at the top.
activity-empty = Nothing has happened yet.
activity-times = { $count } times
activity-registered = Account created
activity-registered-again = Somebody tried to register your email address again
activity-confirmation-requested = Confirmation email requested
activity-confirmed = Email address confirmed
activity-logged-in = Logged in
activity-logged-out = Logged out
activity-password-reset-requested = Password reset requested
activity-password-reset = Password reset
activity-password-changed = Password changed
activity-password-removed = Password removed
activity-address-change-requested = Change of the email address requested
activity-address-changed = Email address changed
activity-renamed = Name changed
activity-session-ended = A device was logged out
activity-sessions-ended = All other devices were logged out
activity-refresh-late = A device was late to renew its login
activity-refresh-stolen = A login was used twice and was ended for your safety
activity-identity-linked = Account linked
activity-identity-unlinked = Account unlinked
activity-client-authorized = Logged in to an application
activity-consent-given = Access for an application allowed
activity-consent-withdrawn = Access for an application removed
activity-changed-by-administrator = Changed by an administrator
activity-login-refused = Login refused
activity-login-limited = Too many attempts to log in
activity-password-check-refused = Wrong password
activity-password-reset-refused = Wrong code for a new password
activity-other = Other event

## Log out

logout-title = Log out?
logout-lead = You will be logged out of { $app } in this browser.
logout-button = Log out
logout-done-title = You are logged out
logout-done-lead = See you soon.

## Access for applications

consent-title = { $client } wants to use your account
consent-account = You are logged in as { $account }.
consent-lead = The application gets:
consent-host = Then you continue at { $host }.
consent-device = Allow this only if you have just opened { $client } on this device yourself.
consent-allow = Allow
consent-deny = Do not allow
consent-switch = Use another account
scope-openid = Your user ID, by which it knows you again
scope-profile = Your name
scope-email = Your email address
scope-groups = Your groups: for example, in which team you are
scope-offline-access = Access while you are away, until you remove it in your account
scope-other = { $scope }

## Back to the application

form-post-title = One moment, please
form-post-lead = You continue at { $host }.
form-post-button = Continue

## Error page

error-title = That did not work
error-title-not-found = Page not found
error-title-busy = One moment, please
error-title-failed = Something went wrong on our side
error-start-again = Start again

## Errors

error-invalid-request = Please check your entries.
error-invalid-code = This code does not work. It may be old or already used. Please request a new one.
error-weak-password = Please choose another password.
error-redirect-url-not-allowed = The application sent you here with an address that we do not know. Please tell its support.
error-invalid-state = This page has expired, or it was opened in another browser. Please start again.
error-invalid-credentials = The email address or the password is not right. Please try again.
error-wrong-password = The password is not right. Please try again.
error-reauthentication-required = Please enter your password, so that we know that it is you.
error-invalid-request-uri = The application started this login too long ago, or it was used already. Please start again in the application.
error-invalid-client = We do not know the application that sent you here. Please tell its support.
error-invalid-provider-token = The login at the other service did not work. Please try again.
error-email-not-verified = Please confirm your email address first. We have sent you an email for that.
error-registration-disabled = New accounts cannot be created here at the moment.
error-user-disabled = This account is locked. Support can tell you more.
error-access-denied = The login was cancelled, or this account cannot be used here.
error-origin-not-allowed = The form came from another website, so we did not accept it. Please start again.
error-not-found = There is nothing at this address. It may have moved.
error-provider-not-found = This way to log in is no longer available. Please choose another one.
error-method-not-allowed = This page cannot be opened in this way. Please start again.
error-email-taken = This email address already has an account. Log in, or reset the password.
error-account-link-required = This email address already has an account. Log in with your password, then link the other account under Linked accounts.
error-last-identity = This is your only way to log in. Please set a password first, or link another account.
error-payload-too-large = That was too long for us. Please shorten your entries.
error-rate-limited = That was a lot of attempts in a short time. Please try again later.
error-rate-limited-minutes = That was a lot of attempts in a short time. Please try again in { $minutes } min.
error-server-error = We are sorry. Please try again. If it happens again, tell us the request ID below.
error-provider-error = The other service did not answer as expected. Please try again, or log in another way.
error-temporarily-unavailable = We cannot be reached for the moment. Please try again in a minute.

## Errors of one field

field-name-missing = Please enter your name.
field-name-invalid = Please use only letters, digits, spaces and punctuation.
field-email-missing = Please enter your email address.
field-email-invalid = Please check the address. It should look like name@example.com.
field-email-domain-not-allowed = Addresses of this domain cannot be used here. Please use another one.
field-code-missing = Please enter the code from the email.
field-password-missing = Please enter your password.
field-password-too-short = Please use at least { $minimum } characters.
field-password-too-long = Please use at most 128 characters.
field-password-guessable = This password is easy to guess. Please use a longer or less common one.
field-too-long = This is too long. Please shorten it.
field-invalid = Please check this entry.
