"""`python -m jaxacct.site` builds the site."""

import sys

from jaxacct.site.build import main

sys.exit(main())
