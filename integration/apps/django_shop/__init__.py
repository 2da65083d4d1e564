"""A Django project with one application, both this package; settings: `integration.apps.django_shop.settings`."""
